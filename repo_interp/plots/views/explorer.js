// The explorer: the map of heads, positions of chosen heads over one prompt side by side, the prompt's text, and a chosen token: where it
// sits, where it looks and what is expected after it, as far as the run holds it. Of a run without positions the heads show where the
// chosen token looks. The address after # restores the view.
"use strict";

window.reportSections = window.reportSections || {};

window.reportSections.positions = function (section, data, page) {
  const STEP = 16; // tokens of Page Up and Page Down
  const AROUND = 40; // tokens shown on either side of a token that is zoomed to
  const MOST_TEXT = 1500; // tokens of text that stand in the page at a time
  const MOST_DOTS = 600; // tokens in view that are drawn one by one
  const COLUMNS = 240; // columns of a running median
  const TICK_WIDTH = 13; // pixels of a token as a tick label
  const NONE = "#5a5a5a";
  const prefix = section.dataset.side === undefined ? "#" : "#" + section.dataset.side + "-"; // ids are unique in the page
  const find = (name) => section.querySelector(prefix + "explorer-" + name);
  const ranges = [...section.querySelectorAll(".switch input")];
  const state = { prompt: data.prompts[0], scale: "own", token: null, match: null, span: null, chosen: null };
  const panels = [];
  const config = Object.assign({}, page.config, {
    doubleClick: false, // it shows the whole prompt in every panel
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d"]],
  });
  const decoded = new Map();

  // ---- data -----------------------------------------------------------------------------------------------------------

  function valuesOf(key, block, row) {
    if (!decoded.has(key)) {
      const bytes = Uint8Array.from(atob(block.values), (character) => character.charCodeAt(0));
      const view = new DataView(bytes.buffer);
      const values = new Array(bytes.length / 4);
      for (let place = 0; place < values.length; place++) values[place] = view.getFloat32(4 * place, true);
      decoded.set(key, values);
    }
    const values = decoded.get(key), count = values.length / (Math.max(...block.row) + 1);
    return values.slice(row * count, (row + 1) * count);
  }

  function rowOf(layer, head) {
    const block = state.prompt.layers[layer];
    if (!block) return null;
    const row = block.row[data.heads.indexOf(head)];
    return { values: valuesOf(state.prompt.prompt + "/" + layer, block, row), global: block.global[row], focused: block.focused[row] };
  }

  // The positions of a head; where the page has no room for them, the outline that it has.
  function outlineOf(layer, head) {
    const shown = rowOf(layer, head);
    if (shown) return shown.values;
    const block = state.prompt.outlines[layer];
    return block ? valuesOf(state.prompt.prompt + "/outline/" + layer, block, block.row[data.heads.indexOf(head)]) : null;
  }

  function alike(layer) {
    const block = state.prompt.layers[layer] || state.prompt.outlines[layer];
    return Boolean(block) && block.row.every((row) => row === block.row[0]) && block.global[0] !== null;
  }

  const UNSEEN = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

  function visible(text) {
    if (text === "") return "∅";
    return Array.from(text, (character) => {
      if (character in UNSEEN) return UNSEEN[character];
      if (!/[\p{C}\p{Z}]/u.test(character)) return character;
      const code = character.codePointAt(0).toString(16);
      return code.length > 2 ? "\\u" + code.padStart(4, "0") : "\\x" + code.padStart(2, "0");
    }).join("");
  }

  const hasText = () => state.prompt.texts !== null;
  page.written = (text) => escaped(shorter(visible(text), 24));
  const label = (token) => (hasText() ? visible(state.prompt.texts[token]) : String(token));
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shorter = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

  function spansOf(token) {
    return Object.entries(state.prompt.spans)
      .filter(([, stretches]) => stretches.some(([first, last]) => first <= token && token <= last))
      .map(([name]) => name);
  }

  function number(value) {
    if (value === null || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    return size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  }

  // ---- panels ---------------------------------------------------------------------------------------------------------

  function options(select, entries) {
    select.replaceChildren(...entries.map(([value, text]) => new Option(text, value)));
  }

  const nameOf = (panel) => "L" + panel.layer + " H" + panel.head;
  const shows = (layer, head) => panels.find((panel) => panel.layer === layer && panel.head === head);

  function addPanel(layer, head) {
    const element = document.createElement("article");
    element.className = "panel";
    element.innerHTML =
      '<div class="panel-head"><label>Layer <select class="layer"></select></label>' +
      '<label>Head <select class="head"></select></label>' +
      '<button type="button" class="remove">Remove</button></div>' +
      '<p class="panel-note"></p><div class="plot" tabindex="0" role="application"></div>';
    const panel = { element, plot: element.querySelector(".plot"), layer, head, drawn: false, vertical: null };
    panel.layerSelect = element.querySelector(".layer");
    panel.headSelect = element.querySelector(".head");
    options(panel.layerSelect, data.layers.map((one) => [one.layer, one.layer + " (" + one.name + ")"]));
    options(panel.headSelect, data.heads.map((one) => [one, String(one)]));
    for (const select of [panel.layerSelect, panel.headSelect]) {
      select.addEventListener("change", () => change(panel, Number(panel.layerSelect.value), Number(panel.headSelect.value)));
    }
    element.querySelector(".remove").addEventListener("click", () => removePanel(panel));
    panel.plot.addEventListener("keydown", keys);
    for (const event of ["pointerdown", "focusin"]) element.addEventListener(event, () => { if (state.chosen !== panel) chooseHead(panel); });
    panels.push(panel);
    find("panels").append(element);
    panels.forEach(draw);
    panels.forEach((one) => Plotly.Plots.resize(one.plot));
    countPanels();
    return panel;
  }

  // Show another head in `panel`; a panel that already shows it takes the old one, so that no head stands there twice.
  function change(panel, layer, head) {
    const other = shows(layer, head), old = [panel.layer, panel.head];
    if (other && other !== panel) [other.layer, other.head] = old;
    Object.assign(panel, { layer, head, vertical: null });
    panels.forEach(draw);
    chooseHead(panel);
  }

  function removePanel(panel) {
    panels.splice(panels.indexOf(panel), 1);
    Plotly.purge(panel.plot);
    panel.element.remove();
    countPanels();
    panels.forEach((one) => Plotly.Plots.resize(one.plot));
    chooseHead(panels[0]);
    panels[0].plot.focus();
  }

  // The chosen head: what other sections follow, and what the next one that is opened replaces.
  function chooseHead(panel) {
    state.chosen = panel;
    for (const one of panels) one.element.classList.toggle("chosen-panel", one === panel && panels.length > 1);
    gallery.mark(panel.layer + "/" + panel.head, panels.map((one) => one.layer + "/" + one.head));
    find("replaces").textContent = "A click opens a head in place of " + nameOf(panel) + ".";
    tellToken();
    tellLooks();
    drawOverview();
    page.events.dispatchEvent(new CustomEvent("head-chosen", { detail: page.chosen() }));
    changed();
  }

  function countPanels() {
    panels.forEach((panel) => { panel.element.querySelector(".remove").hidden = panels.length === 1; });
    find("add").disabled = nextHead() === null;
  }

  // The best-ranked head that no panel shows; null where all are shown.
  function nextHead() {
    const all = [...data.order, ...data.layers.flatMap((layer) => data.heads.map((head) => [layer.layer, head]))];
    return all.find(([layer, head]) => !shows(layer, head)) || null;
  }

  function draw(panel) {
    const layer = data.layers.find((one) => one.layer === panel.layer);
    panel.layerSelect.value = panel.layer;
    panel.headSelect.value = panel.head;
    panel.element.style.setProperty("--scheme", layer.colour);
    const row = rowOf(panel.layer, panel.head);
    panel.row = row;
    const title = "Layer " + panel.layer + ", head " + panel.head + " (" + layer.name + ")";
    panel.plot.setAttribute("aria-label", (data.bare ? "Attention of " : "Positions of ") + title + " over prompt " + state.prompt.prompt);
    panel.element.querySelector(".remove").setAttribute("aria-label", "Remove " + title);
    const colour = page.ink(layer.colour);
    const looks = data.bare && state.token !== null ? page.shown(page.attention(Object.assign(page.chosen(), { layer: panel.layer, head: panel.head }))) : null;
    const lines = looks ? bars(looks, colour) : row ? traces(row.values, colour) : [];
    const chosen = {
      type: "scatter", mode: "markers", x: [], y: [], hoverinfo: "skip", showlegend: false,
      marker: { size: 12, color: "rgba(0,0,0,0)", line: { color: page.colour("--ink"), width: 2 } },
    };
    const layout = page.layout({
      margin: { l: 64, r: 10, t: 8, b: room(ticks(panel, state.span || whole())) },
      hovermode: "x",
      dragmode: "zoom",
      shapes: shapes(),
      xaxis: Object.assign({ title: { text: "token", standoff: 4 }, range: state.span || whole() }, ticks(panel, state.span || whole())),
      yaxis: Object.assign({ title: { text: data.bare ? "attention (%)" : "position" } }, panel.vertical ? { range: panel.vertical, autorange: false } : looks ? { rangemode: "tozero" } : vertical(row)),
      annotations: looks || (row && row.global) ? [] : [{
        text: data.bare ? (state.token === null ? "choose a token to see where this head looks from it" : "not kept for this token") : row ? "no positions in this layer" : "left out of this page", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: NONE, size: 14 },
      }],
    });
    Plotly.react(panel.plot, [chosen, ...lines], layout, config);
    if (!panel.drawn) {
      panel.plot.on("plotly_click", (event) => choose(event.points[0].x, dense() ? "zoom" : "stay"));
      panel.plot.on("plotly_relayout", (change) => followZoom(panel, change));
      panel.plot.on("plotly_doubleclick", showWhole);
      panel.drawn = true;
    }
    ring(panel);
    note(panel);
  }

  // Attention of the chosen token, key by key.
  function bars(looks, colour) {
    const width = looks.size > 1 ? looks.size : Math.max(1, state.prompt.count / 300);
    return [{
      type: "bar", x: looks.blocks.map((block) => (block.first + block.last) / 2), y: looks.blocks.map((block) => 100 * block.share), width,
      customdata: looks.blocks.map((block) => escaped(shorter(label(block.first), 60)) + ", token " + block.first), marker: { color: colour },
      hovertemplate: "<b>%{customdata}</b>: %{y:.3g} %<extra></extra>", showlegend: false,
    }];
  }

  // Tokens in view one by one; of many, the running median between the smallest and the largest of as many columns.
  function traces(values, colour) {
    const view = state.span || whole();
    const reach = view[1] - view[0];
    const first = Math.max(0, Math.floor(view[0] - reach)), last = Math.min(values.length - 1, Math.ceil(view[1] + reach));
    const finite = (value) => (Number.isFinite(value) ? value : null);
    if (reach <= MOST_DOTS) {
      const tokens = Array.from({ length: last - first + 1 }, (_, place) => first + place);
      return [{
        type: "scatter", mode: "lines+markers", x: tokens, y: tokens.map((token) => finite(values[token])),
        customdata: tokens.map((token) => [token, escaped(shorter(label(token), 60)), escaped(spansOf(token).join(", ") || "no span")]),
        line: { color: colour, width: 1 }, marker: { color: colour, size: reach > 300 ? 3 : 4 }, showlegend: false,
        hovertemplate: "<b>%{customdata[1]}</b><br>token %{customdata[0]}, position %{y:.5g}<br>%{customdata[2]}<extra></extra>",
      }];
    }
    const width = columnOf(reach);
    const middle = [], lowest = [], median = [], highest = [], said = [];
    for (let from = first - (first % width); from <= last; from += width) {
      const part = values.slice(Math.max(0, from), from + width).filter(Number.isFinite).sort((a, b) => a - b);
      if (!part.length) continue;
      middle.push(from + (Math.min(width, values.length - from) - 1) / 2);
      lowest.push(part[0]);
      median.push((part[(part.length - 1) >> 1] + part[part.length >> 1]) / 2);
      highest.push(part[part.length - 1]);
      said.push("tokens " + from + "–" + Math.min(values.length - 1, from + width - 1) + ": median " + number(median[median.length - 1]) +
        ", from " + number(part[0]) + " to " + number(part[part.length - 1]));
    }
    return [
      {
        type: "scatter", mode: "lines", fill: "toself", x: [...middle, ...middle.slice().reverse()], y: [...highest, ...lowest.slice().reverse()],
        fillcolor: colour, opacity: 0.3, line: { width: 0 }, hoverinfo: "skip", showlegend: false,
      },
      {
        type: "scatter", mode: "lines", x: middle, y: median, customdata: said, line: { color: colour, width: 1.5 },
        hovertemplate: "%{customdata}<extra></extra>", showlegend: false,
      },
    ];
  }

  const columnOf = (reach) => Math.ceil(reach / COLUMNS);
  const whole = () => [-0.5 - 0.01 * state.prompt.count, state.prompt.count - 0.5 + 0.01 * state.prompt.count];

  // Whether tokens stand closer than a finger can tell them apart.
  function dense() {
    const view = state.span || whole();
    return (view[1] - view[0]) * 5 > (panels[0].plot.clientWidth || 600) - 74;
  }

  function vertical(row) {
    let range = row && (state.scale === "focused" ? row.focused || row.global : row.global);
    if (state.scale === "global") {
      const ranges = panels.map((panel) => rowOf(panel.layer, panel.head)).filter((one) => one && one.global).map((one) => one.global);
      range = ranges.length ? [Math.min(...ranges.map((one) => one[0])), Math.max(...ranges.map((one) => one[1]))] : null;
    }
    return range ? { range: range.slice(), autorange: false } : { range: [0, 1], autorange: false };
  }

  // Token texts where there is room for them, indices elsewhere.
  function ticks(panel, range) {
    const first = Math.max(0, Math.ceil(range[0]));
    const last = Math.min(state.prompt.count - 1, Math.floor(range[1]));
    if (!hasText() || (last - first + 1) * TICK_WIDTH > (panel.plot.clientWidth || 600) - 74) return { tickmode: "auto", tickangle: 0, tickfont: { size: 11 } };
    const shown = Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => first + place);
    return { tickmode: "array", tickvals: shown, ticktext: shown.map((token) => escaped(shorter(label(token), 12))), tickangle: -90, tickfont: { size: 10 } };
  }

  // Room below the axis: more where token texts stand there.
  const room = (shown) => (shown.tickmode === "array" ? 84 : 40);

  // Spans that are shaded, and their deepest parts; the rest is the background.
  function drawnSpans() {
    const names = Object.keys(state.prompt.spans);
    return names.filter((name) => name !== "rest" && !(name.includes(".") && names.some((other) => other.startsWith(name + "."))));
  }

  function shapes() {
    const drawn = [];
    for (const name of drawnSpans()) {
      const part = name.includes(".");
      for (const [first, last] of state.prompt.spans[name]) {
        drawn.push({
          type: "rect", xref: "x", yref: "paper", layer: "below", x0: first - 0.5, x1: last + 0.5, y0: part ? 0.965 : 0, y1: 1,
          fillcolor: data.spans[name].colour, opacity: part ? 1 : 0.3, line: { width: 0 },
        });
      }
    }
    if (state.token !== null) {
      drawn.push({ type: "line", xref: "x", yref: "paper", x0: state.token, x1: state.token, y0: 0, y1: 1, line: { color: page.colour("--ink"), width: 1, dash: "dot" } });
    }
    return drawn;
  }

  function ring(panel) {
    const shown = state.token !== null && panel.row && Number.isFinite(panel.row.values[state.token]);
    Plotly.restyle(panel.plot, { x: [shown ? [state.token] : []], y: [shown ? [panel.row.values[state.token]] : []] }, [0]);
  }

  function note(panel) {
    const said = [];
    if (panel.row && panel.row.global) {
      let low = Infinity, high = -Infinity, outside = 0;
      const range = panel.row.focused;
      for (const value of panel.row.values) {
        low = Math.min(low, value);
        high = Math.max(high, value);
        if (range && (value < range[0] || value > range[1])) outside++;
      }
      said.push("range " + number(high - low) + " (" + number(low) + " to " + number(high) + ")");
      const view = state.span || whole(), reach = view[1] - view[0];
      said.push(reach <= MOST_DOTS ? "every dot is a token" : "line: median of " + columnOf(reach) + " tokens; band: their smallest to largest");
      if (state.scale === "focused" && range) said.push(outside + " of " + state.prompt.count + " tokens lie outside this view");
      if (state.scale === "focused" && !range) said.push("too few tokens to focus");
    }
    panel.element.querySelector(".panel-note").textContent = said.join("; ");
  }

  function followZoom(panel, change) {
    if (!panels.includes(panel) || !("xaxis.range[0]" in change)) return;
    if ("yaxis.range[0]" in change) panel.vertical = [change["yaxis.range[0]"], change["yaxis.range[1]"]];
    setTimeout(() => zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]));
  }

  // Show these tokens in every panel.
  function zoom(range) {
    state.span = range;
    panels.forEach(draw);
    drawOverview();
    page.events.dispatchEvent(new CustomEvent("view-chosen", { detail: page.chosen() }));
    changed();
  }

  function showWhole() {
    for (const panel of panels) panel.vertical = null;
    zoom(null);
  }

  // Zoom to the tokens from `first` to `last`, and some on either side; short prompts stay whole.
  function reveal(first, last) {
    const around = Math.max(AROUND, Math.round(0.3 * (last - first)));
    const width = state.span ? state.span[1] - state.span[0] : Infinity;
    const inside = state.span && first >= state.span[0] && last <= state.span[1];
    if (data.bare || state.prompt.count <= 2 * AROUND || (inside && width <= 2 * around + last - first + 1)) return;
    for (const panel of panels) panel.vertical = null;
    zoom([Math.max(-1, first - around), Math.min(state.prompt.count, last + around)]);
  }

  // ---- the overview ---------------------------------------------------------------------------------------------------

  function drawOverview() {
    const strip = find("overview"), count = state.prompt.count;
    const row = state.chosen && rowOf(state.chosen.layer, state.chosen.head);
    const shown = count > 2 * AROUND && row && row.global;
    strip.toggleAttribute("hidden", !shown);
    if (!shown) return;
    const [low, high] = row.global, bins = Math.min(count, 400);
    const y = (value) => (38 - (36 * (value - low)) / (high - low)).toFixed(1);
    let line = "";
    for (let bin = 0; bin < bins; bin++) {
      const from = Math.floor((bin * count) / bins), part = row.values.slice(from, Math.floor(((bin + 1) * count) / bins));
      const x = (from + part.length / 2).toFixed(1);
      line += (line ? "L" : "M") + x + " " + y(Math.min(...part)) + "L" + x + " " + y(Math.max(...part));
    }
    const box = (first, last, style) => '<rect x="' + first + '" width="' + (last - first) + '" y="0" height="40" ' + style + "/>";
    const shaded = drawnSpans().filter((name) => !name.includes(".")).flatMap((name) => state.prompt.spans[name].map(([first, last]) =>
      box(first, last + 1, 'fill="' + data.spans[name].colour + '" opacity="0.45"')));
    const view = state.span || whole();
    strip.setAttribute("viewBox", "0 0 " + count + " 40");
    strip.innerHTML = shaded.join("") + '<path d="' + line + '" fill="none" vector-effect="non-scaling-stroke"/>' +
      box(Math.max(0, view[0]), Math.min(count, view[1]), 'class="frame" vector-effect="non-scaling-stroke"');
  }

  function moveView(event) {
    const place = find("overview").getBoundingClientRect();
    const token = ((event.clientX - place.left) / place.width) * state.prompt.count;
    const half = state.span ? (state.span[1] - state.span[0]) / 2 : AROUND;
    for (const panel of panels) panel.vertical = null;
    zoom([token - half, token + half]);
  }

  // ---- the chosen token -----------------------------------------------------------------------------------------------

  // Choose a token; `view`: "zoom" to it, "follow" it where it is outside of the view, or "stay".
  function choose(token, view = "follow") {
    state.token = token === null || !Number.isFinite(token) ? null : Math.max(0, Math.min(state.prompt.count - 1, Math.round(token)));
    if (state.match && (state.token === null || state.token < state.match[0] || state.token > state.match[1])) state.match = null;
    find("token").value = state.token === null ? "" : state.token;
    if (state.token !== null && view === "zoom") reveal(state.token, state.match ? state.match[1] : state.token);
    if (state.token !== null && state.span && (state.token < state.span[0] || state.token > state.span[1])) {
      const half = (state.span[1] - state.span[0]) / 2;
      zoom([state.token - half, state.token + half]);
    }
    const drawn = shapes();
    if (data.bare) panels.forEach(draw);
    else for (const panel of panels) {
      ring(panel);
      Plotly.relayout(panel.plot, { shapes: drawn });
    }
    tellToken();
    tellText();
    tellLooks();
    page.events.dispatchEvent(new CustomEvent("token-chosen", { detail: page.chosen() }));
    changed();
  }

  function tellToken() {
    const facts = find("facts");
    if (state.token === null) {
      facts.textContent = "No token is chosen: click one.";
      return;
    }
    const line = document.createElement("div");
    const code = document.createElement("span");
    code.className = "token";
    code.textContent = label(state.token);
    line.append("Token " + state.token + " ", ...(hasText() ? [code, " "] : []), "in " + (spansOf(state.token).join(", ") || "no span") + (data.bare ? "" : "; position "));
    if (!data.bare) line.append(panels.map((panel) => {
      const value = panel.row ? panel.row.values[state.token] : null;
      return number(value) + " (L" + panel.layer + " H" + panel.head + ")";
    }).join(", "));
    facts.replaceChildren(line, ...expected());
  }

  const share = (value) => (value < 1e-4 ? "< 0.01 %" : number(Number((100 * value).toPrecision(3))) + " %");

  // What the model expects after the chosen token, as far as the run holds it.
  function expected() {
    const found = page.predictions(page.chosen());
    if (!found) return [];
    const line = document.createElement("div");
    line.append("Expected next: ");
    found.next.slice(0, 3).forEach((one, rank) => {
      const code = document.createElement("span");
      code.className = "token";
      code.textContent = shorter(visible(one.text), 24);
      line.append(rank ? ", " : "", code, " " + share(one.share));
    });
    if (found.following !== null) line.append("; what does follow has " + share(found.following));
    return [line];
  }

  let shownText = null; // the stretch of the prompt that stands in the page

  function tellText() {
    const text = find("text");
    const count = state.prompt.count, at = state.token === null ? 0 : state.token;
    if (!hasText()) {
      text.replaceChildren();
      return;
    }
    const inside = shownText && shownText.prompt === state.prompt && (at >= shownText.first + 50 || shownText.first === 0) && (at <= shownText.last - 50 || shownText.last === count - 1) && at <= shownText.last;
    if (!inside) {
      const first = Math.max(0, Math.min(at - MOST_TEXT / 2, count - MOST_TEXT));
      shownText = { prompt: state.prompt, first, last: Math.min(count - 1, first + MOST_TEXT - 1) };
      const nodes = [first > 0 ? "… " : ""];
      for (let token = first; token <= shownText.last; token++) nodes.push(tokenNode(token), state.prompt.joint);
      text.replaceChildren(...nodes, shownText.last < count - 1 ? " …" : "");
    }
    for (const node of text.querySelectorAll(".chosen, .match")) {
      node.classList.remove("chosen", "match");
      node.removeAttribute("aria-current");
      node.textContent = written(Number(node.dataset.token), false);
    }
    const node = (token) => text.querySelector('[data-token="' + token + '"]');
    if (state.match) {
      for (let token = state.match[0]; token <= state.match[1]; token++) if (node(token)) node(token).classList.add("match");
    }
    if (state.token === null) return;
    const chosen = node(state.token);
    chosen.classList.add("chosen");
    chosen.setAttribute("aria-current", "true");
    chosen.textContent = written(state.token, true);
    text.scrollTop = chosen.offsetTop - text.offsetTop - text.clientHeight / 2;
  }

  const unseen = (token) => /^[\p{C}]*$/u.test(state.prompt.texts[token]);

  function written(token, chosen) {
    const own = state.prompt.texts[token];
    return unseen(token) || chosen ? visible(own) + (own.includes("\n") ? "\n" : "") : own;
  }

  function tokenNode(token) {
    const node = document.createElement("span");
    node.dataset.token = token;
    node.textContent = written(token, false);
    if (unseen(token)) node.classList.add("unseen");
    const names = spansOf(token).filter((name) => name !== "rest");
    if (names.length) node.style.setProperty("--span", data.spans[names[names.length - 1]].colour);
    node.title = "token " + token + (names.length ? ", " + names.join(", ") : "");
    return node;
  }

  // Where the chosen token looks: the strongest keys in words, and the whole row as shades of the text.
  function tellLooks() {
    for (const node of find("text").querySelectorAll("[data-look]")) {
      node.style.removeProperty("--look");
      node.removeAttribute("data-look");
    }
    const looks = find("looks");
    const row = state.token === null || !state.chosen ? null : page.shown(page.attention(page.chosen()));
    if (state.token === null) looks.textContent = "";
    else if (!row) {
      looks.textContent = page.attentionMissing(page.chosen()) + " ";
      const near = page.nearestRow(page.chosen());
      if (near !== null) {
        const go = document.createElement("button");
        go.type = "button";
        go.textContent = "Choose token " + near;
        go.addEventListener("click", () => choose(near));
        looks.append(go);
      }
    }
    else {
      const blocks = row.blocks.slice().sort((a, b) => b.share - a.share).slice(0, 6);
      const said = blocks.map((block) => {
        const last = Math.min(block.last, block.first + 3);
        const words = hasText() ? " “" + Array.from({ length: last - block.first + 1 }, (_, place) => label(block.first + place)).join(state.prompt.joint) + (last < block.last ? "…" : "") + "”" : "";
        return (block.first === block.last ? block.first : block.first + "–" + block.last) + words + " " + share(block.share);
      });
      looks.textContent = nameOf(state.chosen) + " looks from " + row.from + " at tokens " + said.join(", ") + (row.size > 1 ? "; estimated from mean logits of blocks of " + row.size + " × " + row.size + " pairs." : ".");
      const most = blocks[0].share;
      for (const block of row.blocks) {
        if (block.share < 0.02 * most) continue;
        for (let token = block.first; token <= block.last; token++) {
          const node = find("text").querySelector('[data-token="' + token + '"]');
          if (!node) continue;
          node.dataset.look = "";
          node.style.setProperty("--look", (80 * Math.sqrt(block.share / most)).toFixed(0) + "%");
        }
      }
    }
  }

  function keys(event) {
    const at = state.token === null ? -1 : state.token;
    const goal = {
      ArrowLeft: Math.max(0, at - 1), ArrowRight: at + 1, PageUp: Math.max(0, at - STEP), PageDown: at + STEP,
      Home: 0, End: state.prompt.count - 1, Escape: null,
    };
    if (!(event.key in goal) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(goal[event.key]);
  }

  // The prompt as it is read, in lower case and with runs of white space as one space, and the token of every character.
  function readable() {
    let text = "";
    const owner = [];
    state.prompt.texts.forEach((own, token) => {
      for (const character of (token ? state.prompt.joint : "") + own.toLowerCase()) {
        const written = /\s/.test(character) ? " " : character;
        if (written === " " && text.endsWith(" ")) continue;
        text += written;
        for (let unit = 0; unit < written.length; unit++) owner.push(token);
      }
    });
    return { text, owner };
  }

  function findText(backwards) {
    const wanted = find("find").value.toLowerCase().trim().replace(/\s+/g, " ");
    const told = find("found");
    if (!wanted || !hasText()) {
      told.textContent = wanted ? "This run has no texts." : "";
      return;
    }
    const { text, owner } = readable();
    const matches = [];
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) matches.push([owner[at], owner[at + wanted.length - 1]]);
    if (!matches.length) {
      told.textContent = "“" + find("find").value + "” is not in this prompt.";
      return;
    }
    const at = state.token === null ? (backwards ? Infinity : -1) : state.token;
    let place = backwards ? matches.findLastIndex(([first]) => first < at) : matches.findIndex(([first]) => first > at);
    if (place < 0) place = backwards ? matches.length - 1 : 0;
    state.match = matches[place];
    told.textContent = place + 1 + " of " + matches.length + (matches.length > 1 ? " (Enter: next, Shift+Enter: previous)" : "");
    choose(state.match[0], "zoom");
  }

  // ---- the address ----------------------------------------------------------------------------------------------------

  let restoring = false;

  function changed() {
    if (restoring || !state.chosen || !page.addressed || page.framed) return;
    const parts = new URLSearchParams();
    parts.set("prompt", state.prompt.prompt);
    parts.set("heads", panels.map((panel) => panel.layer + "." + panel.head).join(","));
    parts.set("chosen", panels.indexOf(state.chosen));
    if (state.token !== null) parts.set("token", state.token);
    if (state.span) parts.set("view", state.span.map((end) => Math.round(end)).join("~"));
    if (state.scale !== "own") parts.set("scale", state.scale);
    for (const [name, value] of Object.entries(gallery.state())) if (value !== "" && value !== "-1") parts.set(name, value);
    history.replaceState(null, "", "#explore?" + parts);
  }

  // What the address says; null where it says nothing.
  const addressed = () => (page.addressed && location.hash.startsWith("#explore?") ? new URLSearchParams(location.hash.slice("#explore?".length)) : null);

  // The heads [layer, head] that the address asks for, each once, as far as this page has them.
  function addressedHeads() {
    const parts = addressed();
    const asked = parts ? new Set((parts.get("heads") || "").split(",")) : [];
    return [...asked].map((one) => one.split(".").map(Number)).filter(([layer, head]) => data.layers.some((one) => one.layer === layer) && data.heads.includes(head));
  }

  // Show what the address says, as far as this page has it; true where it says anything.
  function restore() {
    const parts = addressed();
    if (!parts) return false;
    restoring = true;
    const prompt = data.prompts.findIndex((one) => String(one.prompt) === parts.get("prompt"));
    if (prompt >= 0) state.prompt = data.prompts[prompt];
    find("prompt").value = data.prompts.indexOf(state.prompt);
    const known = addressedHeads();
    if (known.length && String(known) !== String(panels.map((panel) => [panel.layer, panel.head]))) {
      while (panels.length) { Plotly.purge(panels[0].plot); panels.shift().element.remove(); }
      for (const [layer, head] of known) if (!shows(layer, head)) addPanel(layer, head);
    }
    state.scale = ["global", "focused"].includes(parts.get("scale")) ? parts.get("scale") : "own";
    for (const radio of ranges) radio.checked = radio.value === state.scale;
    state.chosen = panels[Number(parts.get("chosen"))] || panels[0];
    showPrompt();
    gallery.restore(parts);
    const view = (parts.get("view") || "").split("~").map(Number);
    if (view.length === 2 && view.every(Number.isFinite) && view[0] < view[1]) zoom(view);
    if (parts.has("token")) choose(Number(parts.get("token")), "stay");
    restoring = false;
    return true;
  }

  // ---- the whole ------------------------------------------------------------------------------------------------------

  function showPrompt() {
    state.span = null;
    state.match = null;
    for (const panel of panels) panel.vertical = null;
    const legend = drawnSpans().map((name) => {
      const entry = document.createElement("button");
      const stretches = state.prompt.spans[name];
      entry.type = "button";
      entry.textContent = name + (stretches.length > 1 ? " × " + stretches.length : "");
      entry.title = "jump to " + name + (stretches.length > 1 ? ", the next of " + stretches.length + " stretches" : ", tokens " + stretches[0].join("–"));
      entry.style.setProperty("--span", data.spans[name].colour);
      if (name.includes(".")) entry.style.setProperty("--strength", 1);
      entry.addEventListener("click", () => {
        const [first, last] = stretches.find((stretch) => state.token === null || stretch[0] > state.token) || stretches[0];
        state.match = [first, last];
        choose(first, "zoom");
      });
      return entry;
    });
    find("spans").replaceChildren(...(legend.length ? ["Jump to ", ...legend] : []));
    find("token").max = state.prompt.count - 1;
    find("found").textContent = "";
    panels.forEach(draw);
    gallery.draw();
    choose(null);
    chooseHead(state.chosen);
  }

  const gallery = window.headGallery(section, {
    layers: data.layers, heads: data.heads, page, prompt: () => state.prompt, row: outlineOf, alike, drawnSpans, changed,
    colourOf: (name) => data.spans[name].colour, open: (layer, head) => page.showHead(layer, head),
  });

  page.gallery = section;
  page.chosen = () => ({ layer: state.chosen.layer, head: state.chosen.head, prompt: state.prompt.prompt, token: state.token, count: state.prompt.count, view: state.span });

  page.showHead = function (layer, head) {
    const present = shows(layer, head);
    const panel = present || state.chosen;
    find("said").textContent = present ? nameOf(panel) + " is already shown." : "L" + layer + " H" + head + " is shown in place of " + nameOf(panel) + ".";
    if (present) chooseHead(panel);
    else change(panel, layer, head);
    find("panels").scrollIntoView({ block: "center" });
    panel.plot.focus({ preventScroll: true });
  };

  // Show what was chosen beside this explorer, as far as this run has it.
  page.follow = function (chosen) {
    const prompt = data.prompts.find((one) => one.prompt === chosen.prompt);
    if (prompt && prompt !== state.prompt) {
      state.prompt = prompt;
      find("prompt").value = data.prompts.indexOf(prompt);
      showPrompt();
    }
    const known = data.layers.some((one) => one.layer === chosen.layer) && data.heads.includes(chosen.head);
    const same = state.chosen.layer === chosen.layer && state.chosen.head === chosen.head;
    if (known && !same) {
      const present = shows(chosen.layer, chosen.head);
      if (present) chooseHead(present);
      else change(state.chosen, chosen.layer, chosen.head);
    }
    if (chosen.token !== state.token) choose(chosen.token);
    if (String(chosen.view) !== String(state.span)) {
      for (const panel of panels) panel.vertical = null;
      zoom(chosen.view);
    }
  };

  // Show what a finding names: its prompt, head and token, and its group's map; without a token one whose row of attention is held.
  page.choose = function (given) {
    gallery.colourBy(given.group, given.variable, data.bare, given.prompt !== undefined);
    const wanted = { ...page.chosen(), view: null, ...given };
    const prompt = data.prompts.find((one) => one.prompt === wanted.prompt) || state.prompt;
    if (given.token === undefined) {
      const generated = prompt.spans.generated;
      wanted.token = generated ? Math.max(0, generated[0][0] - 1) : prompt.count - 1;
      const near = page.nearestRow(wanted);
      if (near !== null) wanted.token = near;
    }
    page.follow(wanted);
  };

  page.onTheme.push(() => { panels.forEach(draw); gallery.recolour(); });

  options(find("prompt"), data.prompts.map((one, place) => [place, one.prompt + " (" + one.count + " tokens)"]));
  find("prompt").addEventListener("change", (event) => { state.prompt = data.prompts[event.target.value]; showPrompt(); });
  for (const radio of ranges) {
    radio.name = prefix.slice(1) + radio.name;
    radio.checked = radio.value === state.scale;
    radio.addEventListener("change", () => {
      state.scale = radio.value;
      for (const panel of panels) panel.vertical = null;
      panels.forEach(draw);
      changed();
    });
  }
  find("token").addEventListener("change", (event) => choose(event.target.value === "" ? null : Number(event.target.value), "zoom"));
  find("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") findText(event.shiftKey);
  });
  find("add").addEventListener("click", () => {
    const [layer, head] = nextHead();
    const panel = addPanel(layer, head);
    find("said").textContent = nameOf(panel) + " is added.";
    chooseHead(panel);
    panel.layerSelect.focus();
  });
  find("whole").addEventListener("click", showWhole);
  find("sink").addEventListener("change", (event) => {
    page.withoutSink = event.target.checked;
    if (data.bare) panels.forEach(draw);
    chooseHead(state.chosen);
  });
  find("context").addEventListener("keydown", keys);
  find("text").addEventListener("click", (event) => {
    const node = event.target.closest("span[data-token]");
    if (node) choose(Number(node.dataset.token), "zoom");
  });
  find("overview").addEventListener("pointerdown", (event) => { find("overview").setPointerCapture(event.pointerId); moveView(event); });
  find("overview").addEventListener("pointermove", (event) => { if (event.buttons) moveView(event); });

  section.classList.toggle("bare", Boolean(data.bare));
  find("live").hidden = false;
  restoring = true;
  const asked = addressedHeads(); // drawn at once: a drawing that is not finished cannot be taken away
  const start = asked.length ? asked : data.start.length ? data.start : [[data.layers[data.layers.length - 1].layer, data.heads[0]]];
  start.forEach(([layer, head]) => addPanel(layer, head));
  state.chosen = panels[0];
  showPrompt();
  restoring = false;
  page.onReady.push(() => {
    if (restore()) find("live").scrollIntoView();
    else {
      chooseHead(state.chosen);
      if (page.addressed) page.choose(page.opening || {});
    }
  });
  window.addEventListener("hashchange", restore);
};
// Of a run without positions the explorer stands where its rows of attention are shown.
window.reportSections.attention_rows = window.reportSections.positions;
