// The explorer: positions of chosen heads over one prompt, side by side, and the context of a chosen token.
"use strict";

window.reportSections = window.reportSections || {};

window.reportSections.positions = function (section, data, page) {
  const STEP = 16; // tokens of Page Up and Page Down
  const AROUND = 80; // tokens of context on either side
  const TICK_WIDTH = 13; // pixels of a token as a tick label
  const NONE = "#5a5a5a";
  const find = (name) => section.querySelector("#explorer-" + name);
  const state = { prompt: data.prompts[0], focused: false, token: null, span: null };
  const panels = [];
  const config = Object.assign({}, page.config, {
    doubleClick: false, // it shows the whole prompt in every panel
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d"]],
  });
  const decoded = new Map();

  // ---- data -----------------------------------------------------------------------------------------------------------

  function rowOf(layer, head) {
    const block = state.prompt.layers[layer];
    if (!block) return null;
    const key = state.prompt.prompt + "/" + layer;
    if (!decoded.has(key)) {
      const bytes = Uint8Array.from(atob(block.values), (character) => character.charCodeAt(0));
      const view = new DataView(bytes.buffer);
      const values = new Array(bytes.length / 4);
      for (let place = 0; place < values.length; place++) values[place] = view.getFloat32(4 * place, true);
      decoded.set(key, values);
    }
    const row = block.row[data.heads.indexOf(head)];
    const count = state.prompt.count;
    return {
      values: decoded.get(key).slice(row * count, (row + 1) * count),
      global: block.global[row],
      focused: block.focused[row],
    };
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

  function addPanel(layer, head) {
    const element = document.createElement("article");
    element.className = "panel";
    element.innerHTML =
      '<div class="panel-head"><label>Layer <select class="layer"></select></label>' +
      '<label>Head <select class="head"></select></label><span class="scheme"></span>' +
      '<button type="button" class="remove">Remove</button></div>' +
      '<p class="panel-note"></p><div class="plot" tabindex="0" role="application"></div>';
    const panel = { element, plot: element.querySelector(".plot"), layer, head, drawn: false };
    panel.layerSelect = element.querySelector(".layer");
    panel.headSelect = element.querySelector(".head");
    options(panel.layerSelect, data.layers.map((one) => [one.layer, one.layer + " (" + one.name + ")"]));
    options(panel.headSelect, data.heads.map((one) => [one, String(one)]));
    panel.layerSelect.addEventListener("change", () => { panel.layer = Number(panel.layerSelect.value); draw(panel); tellToken(); });
    panel.headSelect.addEventListener("change", () => { panel.head = Number(panel.headSelect.value); draw(panel); tellToken(); });
    element.querySelector(".remove").addEventListener("click", () => removePanel(panel));
    panel.plot.addEventListener("keydown", keys);
    panels.push(panel);
    find("panels").append(element);
    draw(panel);
    panels.forEach((one) => Plotly.Plots.resize(one.plot));
    countPanels();
    return panel;
  }

  function removePanel(panel) {
    panels.splice(panels.indexOf(panel), 1);
    Plotly.purge(panel.plot);
    panel.element.remove();
    countPanels();
    panels.forEach((one) => Plotly.Plots.resize(one.plot));
    tellToken();
    panels[0].plot.focus();
  }

  function countPanels() {
    panels.forEach((panel) => { panel.element.querySelector(".remove").hidden = panels.length === 1; });
  }

  function draw(panel) {
    const layer = data.layers.find((one) => one.layer === panel.layer);
    panel.layerSelect.value = panel.layer;
    panel.headSelect.value = panel.head;
    panel.element.style.setProperty("--scheme", layer.colour);
    const row = rowOf(panel.layer, panel.head);
    panel.row = row;
    const title = "Layer " + panel.layer + ", head " + panel.head + " (" + layer.name + ")";
    panel.plot.setAttribute("aria-label", "Positions of " + title + " over prompt " + state.prompt.prompt);
    panel.element.querySelector(".remove").setAttribute("aria-label", "Remove " + title);
    const values = row ? row.values : [];
    const tokens = values.map((_, token) => token);
    const line = {
      type: "scatter",
      mode: values.length > 1200 ? "lines" : "lines+markers",
      x: tokens,
      y: values.map((value) => (Number.isFinite(value) ? value : null)),
      customdata: tokens.map((token) => [token, escaped(shorter(label(token), 60)), escaped(spansOf(token).join(", ") || "no span")]),
      line: { color: layer.colour, width: 1 },
      marker: { color: layer.colour, size: 4 },
      hovertemplate: "<b>%{customdata[1]}</b><br>token %{customdata[0]}, position %{y:.5g}<br>%{customdata[2]}<extra></extra>",
      showlegend: false,
    };
    const chosen = {
      type: "scatter", mode: "markers", x: [], y: [], hoverinfo: "skip", showlegend: false,
      marker: { size: 12, color: "rgba(0,0,0,0)", line: { color: "#000", width: 2 } },
    };
    const layout = page.layout({
      margin: { l: 64, r: 10, t: 8, b: room(ticks(panel, state.span || whole())) },
      hovermode: "x",
      dragmode: "zoom",
      shapes: shapes(),
      xaxis: Object.assign({ title: { text: "token", standoff: 4 }, range: state.span || whole() }, ticks(panel, state.span || whole())),
      yaxis: Object.assign({ title: { text: "position (positions)" } }, vertical(row)),
      annotations: row && row.global ? [] : [{
        text: row ? "no positions in this layer" : "left out of this page", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: NONE, size: 14 },
      }],
    });
    Plotly.react(panel.plot, [line, chosen], layout, config);
    if (!panel.drawn) {
      panel.plot.on("plotly_click", (event) => choose(event.points[0].x));
      panel.plot.on("plotly_relayout", (change) => followZoom(panel, change));
      panel.plot.on("plotly_doubleclick", showWhole);
      panel.drawn = true;
    }
    ring(panel);
    note(panel);
  }

  const whole = () => [-0.5 - 0.01 * state.prompt.count, state.prompt.count - 0.5 + 0.01 * state.prompt.count];

  function vertical(row) {
    const range = row && (state.focused ? row.focused || row.global : row.global);
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
      drawn.push({ type: "line", xref: "x", yref: "paper", x0: state.token, x1: state.token, y0: 0, y1: 1, line: { color: "#000", width: 1, dash: "dot" } });
    }
    return drawn;
  }

  function ring(panel) {
    const shown = state.token !== null && panel.row && Number.isFinite(panel.row.values[state.token]);
    Plotly.restyle(panel.plot, { x: [shown ? [state.token] : []], y: [shown ? [panel.row.values[state.token]] : []] }, [1]);
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
      if (state.focused && range) said.push(outside + " of " + state.prompt.count + " tokens lie outside this view");
      if (state.focused && !range) said.push("too few tokens to focus");
    }
    panel.element.querySelector(".panel-note").textContent = said.join("; ");
  }

  let following = false;

  function followZoom(panel, change) {
    if (following || !panels.includes(panel)) return;
    if ("xaxis.range[0]" in change) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]], panel);
  }

  // Show these tokens in every panel; the panel `origin`, where the wish came from, keeps its vertical range.
  async function zoom(range, origin) {
    state.span = range;
    following = true;
    for (const panel of panels) {
      const shown = ticks(panel, range || whole());
      const update = { "xaxis.range": (range || whole()).slice(), "margin.b": room(shown) };
      for (const [name, value] of Object.entries(shown)) update["xaxis." + name] = value;
      if (!origin) update["yaxis.range"] = vertical(panel.row).range;
      await Plotly.relayout(panel.plot, update);
    }
    following = false;
  }

  const showWhole = () => zoom(null, null);

  // ---- the chosen token -----------------------------------------------------------------------------------------------

  function choose(token) {
    state.token = token === null ? null : Math.max(0, Math.min(state.prompt.count - 1, Math.round(token)));
    find("token").value = state.token === null ? "" : state.token;
    const drawn = shapes();
    for (const panel of panels) {
      ring(panel);
      Plotly.relayout(panel.plot, { shapes: drawn });
    }
    tellToken();
    tellText();
    if (state.token !== null && state.span && (state.token < state.span[0] || state.token > state.span[1])) {
      const half = (state.span[1] - state.span[0]) / 2;
      zoom([state.token - half, state.token + half], null);
    }
  }

  function tellToken() {
    const facts = find("facts");
    if (state.token === null) {
      facts.textContent = "No token is chosen.";
      return;
    }
    const line = document.createElement("div");
    const code = document.createElement("span");
    code.className = "token";
    code.textContent = label(state.token);
    line.append("Token " + state.token + " ", ...(hasText() ? [code, " "] : []), "in " + (spansOf(state.token).join(", ") || "no span") + "; position ");
    line.append(panels.map((panel) => {
      const value = panel.row ? panel.row.values[state.token] : null;
      return number(value) + " (L" + panel.layer + " H" + panel.head + ")";
    }).join(", "));
    facts.replaceChildren(line);
  }

  function tellText() {
    const text = find("text");
    if (state.token === null || !hasText()) {
      text.replaceChildren();
      return;
    }
    const first = Math.max(0, state.token - AROUND);
    const last = Math.min(state.prompt.count - 1, state.token + AROUND);
    const nodes = [first > 0 ? "… " : ""];
    for (let token = first; token <= last; token++) {
      const node = document.createElement("span");
      const own = state.prompt.texts[token];
      node.dataset.token = token;
      node.textContent = /^[\p{C}]*$/u.test(own) || token === state.token ? visible(own) + (own.includes("\n") ? "\n" : "") : own;
      if (/^[\p{C}]*$/u.test(own)) node.classList.add("unseen");
      const names = spansOf(token).filter((name) => name !== "rest");
      if (names.length) node.style.setProperty("--span", data.spans[names[names.length - 1]].colour);
      node.title = "token " + token + (names.length ? ", " + names.join(", ") : "");
      if (token === state.token) {
        node.classList.add("chosen");
        node.setAttribute("aria-current", "true");
      }
      nodes.push(node);
    }
    text.replaceChildren(...nodes, last < state.prompt.count - 1 ? " …" : "");
    const chosen = text.querySelector(".chosen");
    text.scrollTop = chosen.offsetTop - text.offsetTop - text.clientHeight / 2;
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

  function findText(backwards) {
    const wanted = find("find").value;
    if (!wanted || !hasText()) return;
    const count = state.prompt.count;
    const from = state.token === null ? (backwards ? 0 : count - 1) : state.token;
    for (let step = 1; step <= count; step++) {
      const token = (from + (backwards ? count - step : step)) % count;
      if (state.prompt.texts[token].toLowerCase().includes(wanted.toLowerCase())) {
        choose(token);
        return;
      }
    }
    find("facts").textContent = "No token holds “" + wanted + "”.";
  }

  // ---- the whole ------------------------------------------------------------------------------------------------------

  function showPrompt() {
    state.span = null;
    const legend = drawnSpans().map((name) => {
      const entry = document.createElement("span");
      entry.textContent = name;
      entry.style.setProperty("--span", data.spans[name].colour);
      if (name.includes(".")) entry.style.setProperty("--strength", 1);
      return entry;
    });
    find("spans").replaceChildren(...legend);
    find("token").max = state.prompt.count - 1;
    panels.forEach(draw);
    choose(null);
  }

  page.showHead = function (layer, head) {
    const present = panels.find((panel) => panel.layer === layer && panel.head === head);
    const panel = present || panels[panels.length - 1];
    Object.assign(panel, { layer, head });
    draw(panel);
    tellToken();
    section.scrollIntoView();
    panel.plot.focus({ preventScroll: true });
    document.dispatchEvent(new CustomEvent("head-chosen", { detail: { layer, head } }));
  };

  options(find("prompt"), data.prompts.map((one, place) => [place, one.prompt + " (" + one.count + " tokens)"]));
  find("prompt").addEventListener("change", (event) => { state.prompt = data.prompts[event.target.value]; showPrompt(); });
  for (const radio of section.querySelectorAll("input[name=explorer-range]")) {
    radio.addEventListener("change", () => {
      state.focused = radio.value === "focused";
      panels.forEach((panel) => {
        Plotly.relayout(panel.plot, { "yaxis.range": vertical(panel.row).range });
        note(panel);
      });
    });
  }
  find("token").addEventListener("change", (event) => choose(event.target.value === "" ? null : Number(event.target.value)));
  find("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") findText(event.shiftKey);
  });
  find("add").addEventListener("click", () => {
    const last = panels[panels.length - 1];
    const next = data.heads[(data.heads.indexOf(last.head) + 1) % data.heads.length];
    addPanel(last.layer, next).layerSelect.focus();
    tellToken();
  });
  find("whole").addEventListener("click", showWhole);
  find("context").addEventListener("keydown", keys);
  find("text").addEventListener("click", (event) => {
    const node = event.target.closest("span[data-token]");
    if (node) choose(Number(node.dataset.token));
  });

  find("live").hidden = false;
  const start = data.start.length ? data.start : [[data.layers[data.layers.length - 1].layer, data.heads[0]]];
  start.forEach(([layer, head]) => addPanel(layer, head));
  showPrompt();
};
