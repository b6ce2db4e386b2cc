// Charts of the explorer: each takes the numbers of an answer and draws them with Plotly. They compute nothing but where a thing is drawn.

export const HEADS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const STATES = { clean: "as it is", changed: "changed", difference: "difference" };
const NEAR = 14; // pixels between a point and the pointer that takes it
const UNSEEN = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

// The text of a token with everything visible that a screen would not show.
export function visible(text) {
  if (text === "") return "∅";
  return Array.from(text, (character) => {
    if (character in UNSEEN) return UNSEEN[character];
    if (!/[\p{C}\p{Z}]/u.test(character)) return character;
    return "\\u" + character.codePointAt(0).toString(16).padStart(4, "0");
  }).join("");
}

// The same within a text, where a space between words is one.
export const readable = (text) => (text.trim() ? text.split(" ").map((part) => part && visible(part)).join(" ") : visible(text));

// For Plotly, which reads some tags in its texts.
const written = (text) => {
  const seen = visible(text);
  return (seen.length > 24 ? seen.slice(0, 23) + "…" : seen).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
};

export const number = (value) => (value === null || value === undefined ? "–" : Math.abs(value) < 1e-4 && value !== 0 ? value.toExponential(2) : String(Number(value.toPrecision(4))));

// A share in percent; one that is too small to matter is not told from 0 by its digits.
export const percent = (share) => (share === null ? "–" : Math.abs(share) < 1e-5 ? (share ? "< 0.001" : "0") : String(Number((100 * share).toPrecision(4))));

// Values of a variable: by state where it has several, else as it is alone.
export function byState(variable) {
  return variable.dims[0] === "state" ? { clean: variable.values[0], changed: variable.values[1] } : { clean: variable.values };
}

function layout(place, given) {
  const style = getComputedStyle(place);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--soft"), ticks: "outside", ticklen: 3 };
  return {
    margin: { l: 56, r: 12, t: 26, b: 40 }, hovermode: "closest", showlegend: !given.plain,
    font: { family: style.fontFamily, size: 12, color: colour("--ink") }, paper_bgcolor: colour("--paper"), plot_bgcolor: colour("--paper"),
    hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--soft"), font: { color: colour("--ink") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, shapes: given.shapes || [],
    xaxis: { ...axis, showgrid: false, zeroline: false, ...given.xaxis }, yaxis: { ...axis, ...given.yaxis },
  };
}

const config = (name) => ({ displaylogo: false, responsive: true, typesetMath: false, showTips: false, toImageButtonOptions: { format: "svg", filename: name }, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });

function draw(place, name, traces, given) {
  return Plotly.react(place, traces, layout(place, given), config(name));
}

const ruler = (place, token) => [{ type: "line", xref: "x", yref: "paper", x0: token, x1: token, y0: 0, y1: 1, line: { color: getComputedStyle(place).getPropertyValue("--soft"), width: 1, dash: "dot" } }];
const nameOf = ([layer, head]) => "L" + layer + " H" + head;

export function positions(place, numbers, state, tokens) {
  const traces = [];
  for (const [which, rows] of Object.entries(byState(numbers.position))) {
    rows.forEach((values, shown) => {
      const changed = which === "changed";
      traces.push({
        type: tokens.length > 1500 ? "scattergl" : "scatter", mode: tokens.length > 400 ? "lines" : "lines+markers", name: nameOf(state.heads[shown]) + (changed ? ", changed" : ""), y: values,
        line: { color: HEADS[shown], width: changed ? 2 : 1.2, dash: changed ? "dash" : "solid" }, marker: { size: changed ? 7 : 5, symbol: changed ? "diamond" : "circle" },
        opacity: "changed" in byState(numbers.position) && !changed ? 0.6 : 1,
        text: tokens.map(written), hovertemplate: "%{x} %{text}: %{y:.4g}<extra></extra>",
      });
    });
  }
  draw(place, "positions", traces, { shapes: ruler(place, state.token), xaxis: { title: { text: "token" } }, yaxis: { title: { text: "position" } } });
}

export function attention(place, numbers, state, tokens) {
  const rows = { ...byState(numbers.weight) };
  if (numbers.weight_difference) rows.difference = numbers.weight_difference.values;
  const which = state.heat in rows ? state.heat : "clean";
  const traces = rows[which].map((values, shown) => ({
    type: "bar", name: nameOf(state.heads[shown]), y: values.map((value) => (value === null ? null : 100 * value)), marker: { color: HEADS[shown] },
    text: tokens.map(written), textposition: "none", hovertemplate: "%{x} %{text}: %{y:.4g} %<extra></extra>",
  }));
  draw(place, "attention", traces, { shapes: ruler(place, state.token), xaxis: { title: { text: "key (token)" }, range: [-1, tokens.length] }, yaxis: { title: { text: "attention (%), " + STATES[which] } } });
}

export function distances(place, numbers, state) {
  const traces = [];
  for (const [which, rows] of Object.entries(byState(numbers.logit))) {
    rows.forEach((values, shown) => {
      const keys = values.map((_, key) => key).filter((key) => values[key] !== null);
      traces.push({
        type: "scatter", mode: "lines+markers", name: nameOf(state.heads[shown]) + (which === "changed" ? ", changed" : ""), x: keys.map((key) => state.token - key), y: keys.map((key) => values[key]),
        line: { color: HEADS[shown], width: 1.2, dash: which === "changed" ? "dash" : "solid" }, marker: { size: 4 }, hovertemplate: "distance %{x}: %{y:.4g}<extra></extra>",
      });
    });
  }
  draw(place, "logits", traces, { xaxis: { title: { text: "distance (tokens)" } }, yaxis: { title: { text: "logit" } } });
}

export function curve(place, numbers, names) {
  const values = numbers.curve ? numbers.curve.values : [numbers.log_probability.values];
  const labels = ["no edit", ...names].slice(0, values.length).map((name) => written(name));
  draw(place, "answer", [{ type: "scatter", mode: "lines+markers", x: values.map((_, place) => place), y: values, marker: { size: 8 }, line: { width: 1.5, color: HEADS[0] }, text: labels, hovertemplate: "%{text}: %{y:.4g} nat<extra></extra>" }], {
    plain: true, xaxis: { title: { text: "edits that are on" }, tickmode: "array", tickvals: values.map((_, place) => place), range: [-0.4, values.length - 0.6] }, yaxis: { title: { text: "log-probability (nat)" } },
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
    return { full, x: event.clientX - box.left - full.xaxis._offset, y: event.clientY - box.top - full.yaxis._offset };
  }

  function nearest(event) {
    const { full, x, y } = at(event), numbers = current(), token = Math.round(full.xaxis.p2d(x));
    if (!numbers) return null;
    const states = byState(numbers.position), rows = states.changed || states.clean;
    const near = rows.map((values, shown) => ({ shown, token, away: values[token] === null || values[token] === undefined ? Infinity : Math.hypot(full.yaxis.d2p(values[token]) - y, full.xaxis.d2p(token) - x) }));
    const best = near.reduce((one, other) => (other.away < one.away ? other : one), { away: Infinity });
    return best.away <= NEAR ? best : null;
  }

  function follow(event) {
    if (!taken) return;
    const { full, y } = at(event);
    taken.value = full.yaxis.p2d(y);
    handle.hidden = false;
    handle.textContent = "token " + taken.token + ": " + number(taken.value);
    handle.style.left = full.xaxis._offset + full.xaxis.d2p(taken.token) + "px";
    handle.style.top = full.yaxis._offset + y + "px";
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
