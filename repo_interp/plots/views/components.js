// Rotary components: the mean logit by distance beside one component, chosen by slider or by its bar of VAF.
"use strict";

window.reportSections = window.reportSections || {};

window.reportSections.components = function (section, data, page) {
  const find = (name) => section.querySelector("#components-" + name);
  const state = { layer: data.layers[0], head: null, place: data.start };
  const heads = page.charts.find((chart) => chart.curves && "mean logit" in chart.curves);
  const curve = find("curve"), bars = find("vaf"), slider = find("slider");
  find("live").hidden = false;

  const digits = (value) => (value === null ? "–" : Number(value).toPrecision(4).replace(/\.?0+$/, ""));
  const said = (one) =>
    "r = " + one.component + ": θ = " + digits(one.theta) + " rad per position, wavelength " + digits(one.wavelength) +
    " positions, " + one.band;

  function fromMean(values) {
    const known = values.filter((value) => value !== null);
    const mean = known.reduce((sum, value) => sum + value, 0) / Math.max(1, known.length);
    return values.map((value) => (value === null ? null : value - mean));
  }

  // The mean logit of the layer, or of the chosen head: distances, and values from their mean.
  function meanLogit() {
    if (state.head === null) return { x: data.distance, y: fromMean(state.layer.logit) };
    const { place } = placeIn(heads, [state.layer.layer, heads.heads[state.head]]), values = packedNumbers(heads.curves["mean logit"]);
    const y = heads.at.map((_, point) => finite(values.getFloat32(4 * (place * heads.at.length + point), true)));
    const last = data.distance[data.distance.length - 1], kept = heads.at.map((_, point) => point).filter((point) => heads.at[point] > 0 && heads.at[point] <= last);
    return { x: kept.map((point) => heads.at[point]), y: fromMean(kept.map((point) => y[point])) };
  }

  function drawCurve() {
    const one = data.components[state.place];
    const last = data.distance[data.distance.length - 1];
    const shapes = data.training_length > last ? [] : [{
      type: "line", yref: "paper", x0: data.training_length, x1: data.training_length, y0: 0, y1: 1,
      line: { color: page.colour("--ink"), width: 1, dash: "dash" }, name: "training length", showlegend: true,
    }];
    Plotly.react(curve, [
      {
        type: "scatter", mode: "lines", name: "mean logit", ...meanLogit(),
        line: { color: page.colour("--ink"), width: 1.2, dash: "dot" }, hovertemplate: "distance %{x}: %{y:.4g} q·k<extra>mean logit</extra>",
      },
      {
        type: "scatter", mode: "lines", name: "component " + one.component + " (" + one.band + ")", x: data.distance,
        y: fromMean(state.layer.components[state.place]), line: { color: page.ink(one.colour), width: 2.5 },
        hovertemplate: "distance %{x}: %{y:.4g} q·k<extra>θ " + digits(one.theta) + ", wavelength " + digits(one.wavelength) + "</extra>",
      },
    ], page.layout({
      hovermode: "closest", shapes: shapes, xaxis: { title: { text: "distance (tokens)" } },
      yaxis: { title: { text: "logit − its mean (q·k)" } },
    }), page.config);
  }

  function drawBars() {
    Plotly.react(bars, [{
      type: "bar", x: data.components.map((one) => one.component), y: state.head === null ? state.layer.vaf : state.layer.heads[state.head],
      customdata: data.components.map((one) => [digits(one.theta), digits(one.wavelength), one.band]),
      marker: {
        color: data.components.map((one) => page.ink(one.colour)),
        line: { color: page.colour("--ink"), width: data.components.map((_, place) => (place === state.place ? 2 : 0)) },
      },
      hovertemplate: "r = %{x}: VAF %{y:.3g} %<br>θ = %{customdata[0]} rad per position<br>wavelength %{customdata[1]} positions<br>%{customdata[2]}<extra></extra>",
    }], page.layout({
      xaxis: { title: { text: "component r (0 turns fastest)" } }, yaxis: { title: { text: "VAF (%)" } },
    }), page.config);
  }

  function choose(place) {
    state.place = Math.min(data.components.length - 1, Math.max(0, place));
    slider.value = state.place;
    find("said").textContent = said(data.components[state.place]);
    slider.setAttribute("aria-valuetext", find("said").textContent);
    drawCurve();
    drawBars();
  }

  // A head is of one layer: the mean of layers has none.
  function drawHeads() {
    const known = heads && state.layer.layer !== null;
    if (!known) state.head = null;
    find("head").replaceChildren(new Option(known ? "all" : "all (choose a layer first)", ""), ...(known ? heads.heads.map((head, number) => new Option(head, number)) : []));
    find("head").value = state.head ?? "";
    find("head").disabled = !known;
    find("head").title = known ? "" : "Choose one layer first";
  }

  find("head").addEventListener("change", (event) => {
    state.head = event.target.value === "" ? null : Number(event.target.value);
    choose(state.place);
  });
  data.layers.forEach((layer, number) => find("layer").add(new Option(layer.name, number)));
  find("layer").addEventListener("change", (event) => {
    state.layer = data.layers[Number(event.target.value)];
    drawHeads();
    choose(state.place);
  });
  page.onTheme.push(() => choose(state.place));
  drawHeads();
  slider.max = data.components.length - 1;
  slider.addEventListener("input", () => choose(Number(slider.value)));
  choose(state.place);
  bars.on("plotly_click", (event) => choose(event.points[0].pointNumber));
};
