// Charts of the explorer: each takes the numbers of an answer and draws them with Plotly. They compute nothing but where a thing is drawn.

import { holds, nameOf, number, written } from "./dom.js";

export const HEADS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const STATES = { clean: "as it is", changed: "changed", difference: "difference" };
const NEAR = 14; // pixels between a point and the pointer that takes it
const MOST_DOTS = 600; // tokens in view that are drawn one by one
const COLUMNS = 240; // columns of a running median
const FAR = 100; // tokens: a chart of larger distances has a logarithmic axis
const TENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
const TICK_WIDTH = 13; // pixels of a token as a tick label

// Values of a variable: by state where it has several, else as it is alone.
export function byState(variable) {
  return variable.dims[0] === "state" ? { clean: variable.values[0], changed: variable.values[1] } : { clean: variable.values };
}

export const colourOf = (place, name) => getComputedStyle(place).getPropertyValue(name).trim();

// The layout of a chart in the colours of `place`, with what is `given`.
export function layout(place, given) {
  const style = getComputedStyle(place), colour = (name) => colourOf(place, name);
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--soft"), ticks: "outside", ticklen: 3, exponentformat: "power", ticklabeloverflow: "allow" };
  const further = Object.fromEntries(Object.entries(given).filter(([name]) => /^yaxis\d/.test(name)).map(([name, value]) => [name, { ...axis, ...value }]));
  return {
    margin: { l: 60, r: 12, t: 26, b: 40 }, hovermode: "closest",
    font: { family: style.fontFamily, size: 12, color: colour("--ink") }, paper_bgcolor: colour("--paper"), plot_bgcolor: colour("--paper"),
    hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--soft"), font: { color: colour("--ink") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, ...given, ...further,
    xaxis: { ...axis, showgrid: false, zeroline: false, ...given.xaxis }, yaxis: { ...axis, ...given.yaxis },
  };
}

// No button that would send anything anywhere.
export const config = (name) => ({ displaylogo: false, responsive: true, typesetMath: false, showTips: false, toImageButtonOptions: { format: "svg", filename: name }, doubleClick: name === "positions" ? false : "reset", modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] });

function draw(place, name, traces, given) {
  return Plotly.react(place, traces, layout(place, given), config(name));
}

const ruler = (place, token) => ({ type: "line", xref: "x", yref: "paper", x0: token, x1: token, y0: 0, y1: 1, line: { color: colourOf(place, "--soft"), width: 1, dash: "dot" } });

// Spans that are shaded, and their deepest parts; the rest is the background.
export function shadedSpans(spans) {
  const names = Object.keys(spans);
  return names.filter((name) => name !== "rest" && !(name.includes(".") && names.some((other) => other.startsWith(name + "."))));
}

function shades(spans) {
  return shadedSpans(spans).flatMap((name) => spans[name].at.map(([first, last]) => ({
    type: "rect", xref: "x", yref: "paper", layer: "below", x0: first - 0.5, x1: last + 0.5, y0: name.includes(".") ? 0.97 : 0, y1: 1,
    fillcolor: spans[name].colour, opacity: name.includes(".") ? 1 : 0.25, line: { width: 0 },
  })));
}

export const whole = (prompt) => [-0.5 - 0.01 * prompt.tokens.length, prompt.tokens.length - 0.5 + 0.01 * prompt.tokens.length];

// Tokens in view one by one; of many, the running median between the smallest and the largest of as many columns.
function lines(values, prompt, reach, view, colour, changed) {
  const first = Math.max(0, Math.floor(view[0] - reach)), last = Math.min(values.length - 1, Math.ceil(view[1] + reach));
  const line = { color: colour, width: changed ? 2 : 1.2, dash: changed ? "dash" : "solid" };
  if (reach <= MOST_DOTS) {
    const tokens = Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => first + place);
    const spans = (token) => Object.keys(prompt.spans).filter((name) => holds(prompt.spans[name].at, token)).join(", ") || "no span";
    return [{
      type: "scatter", mode: reach > 400 ? "lines" : "lines+markers", x: tokens, y: tokens.map((token) => values[token]), line, marker: { color: colour, size: changed ? 7 : 5, symbol: changed ? "diamond" : "circle" },
      text: tokens.map((token) => written(prompt.tokens[token], 60)), customdata: tokens.map((token) => written(spans(token), 60)), hovertemplate: "%{x} <b>%{text}</b>: %{y:.5g}<br>%{customdata}<extra></extra>",
    }];
  }
  const width = Math.ceil(reach / COLUMNS), middle = [], lowest = [], median = [], highest = [], said = [];
  for (let from = first - (first % width); from <= last; from += width) {
    const part = values.slice(from, from + width).filter((value) => value !== null).sort((a, b) => a - b);
    if (!part.length) continue;
    middle.push(from + (Math.min(width, values.length - from) - 1) / 2);
    lowest.push(part[0]);
    median.push((part[(part.length - 1) >> 1] + part[part.length >> 1]) / 2);
    highest.push(part[part.length - 1]);
    said.push("tokens " + from + "–" + Math.min(values.length - 1, from + width - 1) + ": median " + number(median[median.length - 1]) + ", from " + number(part[0]) + " to " + number(part[part.length - 1]));
  }
  return [
    { type: "scatter", mode: "lines", x: middle, y: median, line, customdata: said, hovertemplate: "%{customdata}<extra></extra>" },
    { type: "scatter", mode: "lines", fill: "toself", x: [...middle, ...middle.slice().reverse()], y: [...highest, ...lowest.slice().reverse()], fillcolor: colour, opacity: 0.3, line: { width: 0 }, hoverinfo: "skip", showlegend: false },
  ];
}

// Token texts where there is room for them, indices elsewhere.
function ticks(place, prompt, view) {
  const first = Math.max(0, Math.ceil(view[0])), last = Math.min(prompt.tokens.length - 1, Math.floor(view[1]));
  if (prompt.texts === false || (last - first + 1) * TICK_WIDTH > (place.clientWidth || 600) - 74) return { tickmode: "auto", tickangle: 0 };
  const shown = Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => first + at);
  return { tickmode: "array", tickvals: shown, ticktext: shown.map((token) => written(prompt.tokens[token], 12)), tickangle: -90, tickfont: { size: 10 } };
}

// The limits of the axis of a head: its own, those of all heads, or without what lies far outside; none where Plotly finds them.
function limits(ranges, state, shown) {
  if (!ranges) return {};
  const known = ranges.filter((each) => each.global);
  if (!known.length) return { range: [0, 1], autorange: false };
  const all = [Math.min(...known.map((each) => each.global[0])), Math.max(...known.map((each) => each.global[1]))];
  const range = state.range === "global" ? all : (state.range === "focused" && ranges[shown].focused) || ranges[shown].global || [0, 1];
  return { range: range.slice(), autorange: false };
}

// Positions of the chosen heads over the tokens: one below the other, or where the range is global on one axis.
export function positions(place, { numbers, ranges }, state, prompt) {
  const view = state.view || whole(prompt), reach = view[1] - view[0], states = byState(numbers.position), axes = state.range === "global" ? 1 : state.heads.length;
  const axis = (shown) => (axes === 1 || shown === 0 ? "" : String(shown + 1)), traces = [], rings = [];
  for (const [which, rows] of Object.entries(states)) {
    rows.forEach((values, shown) => {
      const more = { name: nameOf(state.heads[shown]) + (which === "changed" ? ", changed" : ""), yaxis: "y" + axis(shown), opacity: "changed" in states && which !== "changed" ? 0.6 : 1 };
      traces.push(...lines(values, prompt, reach, view, HEADS[shown], which === "changed").map((trace) => ({ ...more, ...trace })));
      const value = values[state.token];
      if (value !== null && value !== undefined && which === Object.keys(states).pop()) rings.push({ type: "circle", xref: "x", yref: "y" + axis(shown), xsizemode: "pixel", ysizemode: "pixel", xanchor: state.token, yanchor: value, x0: -6, x1: 6, y0: -6, y1: 6, line: { color: colourOf(place, "--ink"), width: 2 } });
    });
  }
  const yaxes = {}, annotations = [];
  for (let shown = 0; shown < axes; shown++) {
    const top = 1 - shown / axes, bottom = 1 - (shown + 1) / axes + (shown + 1 < axes ? 0.04 : 0);
    yaxes["yaxis" + axis(shown)] = { title: { text: axes > 1 ? nameOf(state.heads[shown]) : "position" }, domain: [bottom, top], ...limits(ranges, state, shown) };
    const rows = axes > 1 ? [states.clean[shown]] : states.clean;
    if (rows.every((values) => values.every((value) => value === null))) annotations.push({ text: ranges ? ranges[shown].missing : "no positions in this layer", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: (top + bottom) / 2, font: { size: 14 } });
  }
  const labels = ticks(place, prompt, view);
  const height = Math.max(320, 200 * axes);
  place.style.height = height + "px";
  draw(place, "positions", traces, {
    ...yaxes, height, annotations, showlegend: traces.length > 1 && (axes === 1 || "changed" in states), shapes: [...shades(prompt.spans), ruler(place, state.token), ...rings], uirevision: JSON.stringify([state.heads, state.range, state.prompt, state.text, state.view]),
    margin: { l: 60, r: 12, t: 26, b: labels.tickmode === "array" ? 84 : 40 }, xaxis: { title: { text: "token", standoff: 4 }, range: view.slice(), anchor: "y" + axis(axes - 1), ...labels },
  });
}

// What is seen of the positions of a head, in words.
export function seen(values, range, state, prompt) {
  const known = values.filter((value) => value !== null), view = state.view || whole(prompt), reach = view[1] - view[0];
  if (!known.length) return "";
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b)), said = ["range " + number(high - low) + " (" + number(low) + " to " + number(high) + ")"];
  if (reach > MOST_DOTS) said.push("line: median of " + Math.ceil(reach / COLUMNS) + " tokens; band: their smallest to largest");
  if (state.range === "focused" && range) said.push(range.focused ? known.filter((value) => value < range.focused[0] || value > range.focused[1]).length + " of " + known.length + " tokens lie outside this view" : "too few tokens to focus");
  return said.join("; ");
}

export function attention(place, rows, state, prompt, sizes) {
  const which = state.heat in rows ? state.heat : "clean", count = prompt.tokens.length;
  const traces = rows[which].map((values, shown) => {
    const keys = values.map((_, key) => key).filter((key) => values[key] !== null);
    return {
      type: "bar", name: nameOf(state.heads[shown]), x: keys, y: keys.map((key) => 100 * values[key]), marker: { color: HEADS[shown], line: { width: 0 } }, width: Math.max(0.8 / rows[which].length, count / 500),
      text: keys.map((key) => written(prompt.tokens[key])), textposition: "none", hovertemplate: "%{x} %{text}: %{y:.4g} %<extra></extra>",
    };
  });
  const estimated = sizes && sizes.some((size) => size > 1) ? ", estimated from block means" : "";
  draw(place, "attention", traces, { showlegend: traces.length > 1, bargap: 0, shapes: [ruler(place, state.token)], xaxis: { title: { text: "key (token)" }, range: [-1, count] }, yaxis: { title: { text: "attention (%)" + ("changed" in rows ? ", " + STATES[which] : "") + estimated } } });
}

// `around`: of a run that keeps the strongest keys alone, those of all tokens of each head; where they are far apart, distances double.
export function distances(place, numbers, state, sparse, around) {
  const traces = [], far = around && Math.max(...around.flatMap(({ x }) => [Math.max(0, ...x)])) > FAR;
  const at = (distance) => (far ? Math.max(distance, 0.5) : distance);
  for (const [which, rows] of Object.entries(byState(numbers.logit))) {
    rows.forEach((values, shown) => {
      const keys = values.map((_, key) => key).filter((key) => values[key] !== null);
      traces.push({
        type: "scatter", mode: sparse && keys.length <= state.token ? "markers" : keys.length > 200 ? "lines" : "lines+markers", name: nameOf(state.heads[shown]) + (around ? " from token " + state.token : "") + (which === "changed" ? ", changed" : ""), x: keys.map((key) => at(state.token - key)), y: keys.map((key) => values[key]),
        customdata: keys.map((key) => [key, state.token - key]), line: { color: HEADS[shown], width: 1.2, dash: which === "changed" ? "dash" : "solid" }, marker: { size: around ? 8 : 4 }, hovertemplate: "token %{customdata[0]}, distance %{customdata[1]}: %{y:.4g}<extra></extra>",
      });
    });
  }
  (around || []).forEach(({ x, y }, shown) => traces.push({ type: "scatter", mode: "markers", name: nameOf(state.heads[shown]) + " from other tokens", x: x.map(at), y, customdata: x, opacity: 0.35, marker: { size: 3, color: colourOf(place, "--soft") }, hovertemplate: "distance %{customdata}: %{y:.4g}<extra></extra>" }));
  const doubling = { type: "log", tickmode: "array", tickvals: [0.5, ...TENS], ticktext: ["0", ...TENS.map(String)] };
  draw(place, "logits", traces, { showlegend: traces.length > 1, xaxis: { title: { text: "distance (tokens)" }, ...(far && doubling) }, yaxis: { title: { text: "logit" } } });
}

// Rows of heads by distance, colored by the order that their positions tell; calls `chosen` with the first head of a row.
export function orders(place, { distances, rows }, shown, chosen) {
  const name = ({ heads }) => nameOf(heads[0]) + (heads.length > 1 ? "-H" + heads[heads.length - 1][1] : "");
  const holds = ({ heads }) => heads.some((one) => shown.some((other) => one[0] === other[0] && one[1] === other[1]));
  const trace = {
    type: "heatmap", x: distances.map(String), y: rows.map(name), z: rows.map(({ values }) => values), zmin: -1, zmax: 1, xgap: 1, ygap: 1,
    colorscale: [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f7f7f7"], [0.75, "#f4a582"], [1, "#b2182b"]], colorbar: { title: { text: "order" }, tickvals: [-1, 0, 1], thickness: 12 }, hovertemplate: "%{y}, %{x} tokens apart: %{z:.2f}<extra></extra>",
  };
  const frames = rows.flatMap((row, at) => (holds(row) ? [{ type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: at - 0.5, y1: at + 0.5, line: { color: HEADS[0], width: 2 } }] : []));
  place.style.height = Math.max(180, 90 + 13 * rows.length) + "px";
  draw(place, "orders", [trace], { showlegend: false, margin: { l: 90, r: 12, t: 32, b: 40 }, shapes: frames, xaxis: { type: "category", title: { text: "tokens from one to the other" } }, yaxis: { type: "category", autorange: "reversed", dtick: 1, tickfont: { size: 10 } } });
  place.removeAllListeners("plotly_click");
  place.on("plotly_click", ({ points: [point] }) => chosen(rows[point.pointIndex[0]].heads[0]));
}

// The whole prompt as a strip: positions of one head, spans, and a frame around what is in view.
export function overview(strip, values, state, prompt) {
  const count = prompt.tokens.length, known = values.filter((value) => value !== null), bins = Math.min(count, 400);
  strip.toggleAttribute("hidden", !known.length);
  if (!known.length) return;
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b)), view = state.view || whole(prompt);
  const y = (value) => (high > low ? 38 - (36 * (value - low)) / (high - low) : 20).toFixed(1);
  let line = "";
  for (let bin = 0; bin < bins; bin++) {
    const from = Math.floor((bin * count) / bins), part = values.slice(from, Math.floor(((bin + 1) * count) / bins)).filter((value) => value !== null);
    const x = (from + part.length / 2).toFixed(1);
    if (part.length) line += (line ? "L" : "M") + x + " " + y(Math.min(...part)) + "L" + x + " " + y(Math.max(...part));
  }
  const box = (first, last, style) => '<rect x="' + first + '" width="' + (last - first) + '" y="0" height="40" ' + style + "/>";
  const ground = shadedSpans(prompt.spans).filter((name) => !name.includes(".")).flatMap((name) => prompt.spans[name].at.map(([first, last]) => box(first, last + 1, 'fill="' + prompt.spans[name].colour + '" opacity="0.45"')));
  strip.setAttribute("viewBox", "0 0 " + count + " 40");
  strip.innerHTML = ground.join("") + '<path d="' + line + '" fill="none" vector-effect="non-scaling-stroke"/>' + box(Math.max(0, view[0]), Math.min(count, view[1]), 'class="frame" vector-effect="non-scaling-stroke"');
}

export function curve(place, numbers, names) {
  const values = numbers.curve.values;
  const labels = ["no edit", ...names].slice(0, values.length).map((name) => written(name));
  draw(place, "answer", [{ type: "scatter", mode: "lines+markers", x: values.map((_, place) => place), y: values, marker: { size: 8 }, line: { width: 1.5, color: HEADS[0] }, text: labels, hovertemplate: "%{text}: %{y:.4g} nat<extra></extra>" }], {
    showlegend: false, xaxis: { title: { text: "edits that are on" }, tickmode: "array", tickvals: values.map((_, place) => place), range: [-0.4, values.length - 0.6] }, yaxis: { title: { text: "log-probability (nat)" } },
  });
}

export const save = (place, format, name) => Plotly.downloadImage(place, { format, filename: name, width: 900, height: 420, scale: format === "png" ? 2 : 1 });

// Lets a reader take a point of the last state and move it up or down: calls `moved` with the number of its head, its token and its value.
export function draggable(place, current, moved) {
  const handle = document.createElement("output");
  handle.className = "handle";
  handle.hidden = true;
  place.append(handle);
  let taken = null;

  function at(event) {
    const full = place._fullLayout, box = place.getBoundingClientRect();
    return { full, x: event.clientX - box.left - full.xaxis._offset, y: event.clientY - box.top };
  }

  const axisOf = (full, shown) => full["yaxis" + (shown + 1)] || full.yaxis;

  function nearest(event) {
    const { full, x, y } = at(event), numbers = current(), token = Math.round(full.xaxis.p2d(x));
    if (!numbers) return null;
    const states = byState(numbers.position), rows = states.changed || states.clean;
    const near = rows.map((values, shown) => ({ shown, token, away: values[token] === null || values[token] === undefined ? Infinity : Math.hypot(axisOf(full, shown)._offset + axisOf(full, shown).d2p(values[token]) - y, full.xaxis.d2p(token) - x) }));
    const best = near.reduce((one, other) => (other.away < one.away ? other : one), { away: Infinity });
    return best.away <= NEAR ? best : null;
  }

  function follow(event) {
    if (!taken) return;
    const { full, y } = at(event);
    const axis = axisOf(full, taken.shown);
    taken.value = axis.p2d(y - axis._offset);
    handle.hidden = false;
    handle.textContent = "token " + taken.token + ": " + number(taken.value);
    handle.style.left = full.xaxis._offset + full.xaxis.d2p(taken.token) + "px";
    handle.style.top = y + "px";
    event.stopPropagation();
    event.preventDefault();
  }

  place.addEventListener("pointerdown", (event) => {
    taken = place._fullLayout && event.button === 0 ? nearest(event) : null;
    if (!taken) return;
    place.setPointerCapture(event.pointerId);
    follow(event);
  }, true);
  for (const type of ["mousedown", "touchstart"]) place.addEventListener(type, (event) => { if (taken) event.stopPropagation(); }, true);
  place.addEventListener("pointermove", follow, true);
  place.addEventListener("pointerup", () => {
    const done = taken;
    taken = null;
    handle.hidden = true;
    if (done && done.value !== undefined) moved(done.shown, done.token, done.value);
  }, true);
  place.addEventListener("pointercancel", () => { taken = null; handle.hidden = true; });
}
