// Charts of the chosen head: curves, images of block means, arrows, and numbers of the chosen prompt. They follow the explorer; where the
// page has none, a click in a map of heads.
import { colourOf, config, layout } from "./charts.js";
import { el, finite, ink, number, packedNumbers } from "./dom.js";
import { cellOf, placeIn } from "./stored.js";

const COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#cc79a7"];

function curves(chart, own) {
  const names = Object.keys(chart.curves);
  const traces = names.map((name, place) => {
    const values = packedNumbers(chart.curves[name]), points = chart.at.length;
    const y = chart.at.map((_, point) => finite(values.getFloat32(4 * (own.place * points + point), true)));
    return { type: "scatter", mode: "lines", name, x: chart.at, y, line: { width: 1.5, color: names.length > 1 ? COLOURS[place] : ink(own.colour) }, hovertemplate: "%{x}: %{y:.4g}<extra>" + name + "</extra>" };
  });
  if (traces.every((trace) => trace.y.every((value) => value === null))) return null;
  return { traces, layout: { showlegend: names.length > 1, xaxis: { title: { text: chart.x } }, yaxis: { title: { text: chart.y } } } };
}

function arrows(chart, own, chosen, place) {
  const [x, y, strong] = ["real", "imaginary", "strong"].map((name) => chart[name][own.row][own.column]);
  const known = x.map((_, component) => component).filter((component) => x[component] !== null && y[component] !== null);
  if (!known.length) return null;
  const colour = (component) => (strong[component] === 1 ? ink(own.colour) : colourOf(place, "--soft"));
  const reach = 1.15 * Math.max(1e-12, ...known.map((component) => Math.hypot(x[component], y[component])));
  return {
    traces: [{
      type: "scatter", mode: "markers", x: known.map((component) => x[component]), y: known.map((component) => y[component]),
      customdata: known, marker: { size: 6, color: known.map(colour) }, hovertemplate: "component %{customdata}: %{x:.4g} + %{y:.4g} i<extra></extra>",
    }],
    layout: {
      showlegend: false, xaxis: { title: { text: chart.x }, range: [-reach, reach], zeroline: true, constrain: "domain" },
      yaxis: { title: { text: "at a right angle (logits)" }, range: [-reach, reach], scaleanchor: "x", scaleratio: 1, constrain: "domain" },
      annotations: known.map((component) => ({ x: x[component], y: y[component], ax: 0, ay: 0, xref: "x", yref: "y", axref: "x", ayref: "y", showarrow: true, arrowhead: 2, arrowwidth: 1.2, arrowcolor: colour(component), text: "" })),
    },
  };
}

function image(chart, own, chosen, place) {
  if (chosen.prompt !== null && chosen.prompt !== chart.prompt) return { message: "The run has this map only for prompt " + chart.prompt + "." };
  const rows = Array.from({ length: chart.rows }, (_, row) => Array.from({ length: chart.columns }, (_, column) => cellOf(chart, own, row, column)));
  const starts = (count) => Array.from({ length: count }, (_, block) => block * chart.size + (chart.size - 1) / 2);
  const here = chart.causal_logits && chosen.token !== null
    ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: chosen.token, y1: chosen.token, line: { color: colourOf(place, "--ink"), width: 1, dash: "dot" } }] : [];
  return {
    traces: [{
      type: "heatmap", z: rows, x: starts(chart.columns), y: starts(chart.rows), colorscale: "Viridis", colorbar: { thickness: 10, title: { text: "logits" } },
      hoverongaps: false, hovertemplate: chart.y + " %{y}<br>" + chart.x + " %{x}: %{z:.4g}<extra></extra>",
    }],
    layout: { shapes: here, xaxis: { title: { text: chart.x }, constrain: "domain" }, yaxis: { title: { text: chart.y }, autorange: "reversed", scaleanchor: "x", scaleratio: 1, constrain: "domain" } },
  };
}

const KINDS_OF_CHART = { curves, arrows, image };

export function drawHeadCharts(place, charts, page) {
  const title = el("h3"), numbers = el("p", { className: "said" }), grid = el("div", { className: "panels" });
  const own = charts.filter((chart) => chart.kind in KINDS_OF_CHART), panels = own.map((chart) => {
    const blocks = chart.kind !== "image" ? "" : " of prompt " + chart.prompt + (chart.size > 1 ? ", a pixel is the mean over " + chart.size + " × " + chart.size + " pairs" : "");
    const message = el("p", { className: "panel-note" }), plot = el("div", { className: chart.kind === "curves" ? "plot" : "plot square" });
    grid.append(el("article", { className: "panel" }, el("h4", { textContent: chart.title + blocks }), message, plot));
    return { chart, message, plot };
  });

  function draw(chosen) {
    const pair = [chosen.layer, chosen.head];
    title.textContent = "Layer " + chosen.layer + ", head " + chosen.head;
    numbers.textContent = charts.filter((chart) => chart.kind === "number").map((chart) => {
      const at = placeIn(chart, pair), prompt = chosen.prompt === null ? 0 : chart.prompts.indexOf(chosen.prompt);
      return chart.title + ": " + (at && prompt >= 0 ? number(chart.values[prompt][at.row][at.column]) + " (prompt " + chart.prompts[prompt] + ")" : "–");
    }).join("; ");
    for (const { chart, message, plot } of panels) {
      const at = placeIn(chart, pair);
      const { message: said = "", traces, layout: given } = (at && KINDS_OF_CHART[chart.kind](chart, at, chosen, place)) || { message: "The run has no data of this head for this chart." };
      message.textContent = said;
      plot.hidden = !traces;
      if (traces) Plotly.react(plot, traces, layout(plot, { margin: { l: 64, r: 10, t: 28, b: 40 }, ...given }), config(chart.title));
    }
  }

  place.append(title, numbers, grid);
  place.hidden = false;
  let waiting = null, inView = false;
  const follow = () => { if (waiting && inView) { const chosen = waiting; waiting = null; draw(chosen); } };
  // Charts are drawn when they come into view, since every key press chooses another token.
  new IntersectionObserver((entries) => { inView = entries[entries.length - 1].isIntersecting; follow(); }, { rootMargin: "300px" }).observe(place);
  page.events.addEventListener("chosen", () => { waiting = page.chosen(); follow(); });
  page.onTheme.push(() => { waiting = page.chosen(); follow(); });
  page.onPrint.push(() => { if (waiting) { const chosen = waiting; waiting = null; draw(chosen); } });
}
