// Charts of the chosen head: curves, images of block means, arrows, rows of attention, numbers of the chosen prompt; and the next tokens
// after the chosen one. They follow the explorer; where the page has none, a click in a map of heads. An image of causal logits also gives
// the attention of a token, and draws its row.
"use strict";

window.drawHeadCharts = function (place, charts, page) {
  const made = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;
  const digits = (value) => (value === null || value === undefined || !Number.isFinite(value) ? "–" : String(Number(value.toPrecision(4))));
  const COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#cc79a7"];
  const title = made("h3");
  const numbers = made("p", { className: "said" });
  const grid = made("div", { className: "panels" });
  const drawn = [];

  function headOf(chart, chosen) {
    const layer = chart.layers.findIndex((one) => one.layer === chosen.layer), head = chart.heads.indexOf(chosen.head);
    return layer < 0 || head < 0 ? null : { layer, head, place: layer * chart.heads.length + head, colour: page.ink(chart.layers[layer].colour) };
  }

  // ---- curves and arrows ----------------------------------------------------------------------------------------------

  function curves(chart, own) {
    const names = Object.keys(chart.curves);
    const traces = names.map((name, number) => {
      chart.decoded = chart.decoded || {};
      const view = chart.decoded[name] || (chart.decoded[name] = new DataView(bytes(chart.curves[name])));
      const points = chart.at.length;
      const y = chart.at.map((_, point) => {
        const value = view.getFloat32(4 * (own.place * points + point), true);
        return Number.isFinite(value) ? value : null;
      });
      return { type: "scatter", mode: "lines", name, x: chart.at, y, line: { width: 1.5, color: names.length > 1 ? COLOURS[number] : own.colour }, hovertemplate: "%{x}: %{y:.4g}<extra>" + name + "</extra>" };
    });
    if (traces.every((trace) => trace.y.every((value) => value === null))) return null;
    return { traces, layout: { showlegend: names.length > 1, hovermode: "closest", xaxis: { title: { text: chart.x } }, yaxis: { title: { text: chart.y } } } };
  }

  function arrows(chart, own) {
    const [x, y, strong] = ["real", "imaginary", "strong"].map((name) => chart[name][own.layer][own.head]);
    const known = x.map((_, component) => component).filter((component) => x[component] !== null && y[component] !== null);
    if (!known.length) return null;
    const colour = (component) => (strong[component] === 1 ? own.colour : page.colour("--soft"));
    const reach = 1.15 * Math.max(1e-12, ...known.map((component) => Math.hypot(x[component], y[component])));
    return {
      traces: [{
        type: "scatter", mode: "markers", x: known.map((component) => x[component]), y: known.map((component) => y[component]),
        customdata: known, marker: { size: 6, color: known.map(colour) }, hovertemplate: "component %{customdata}: %{x:.4g} + %{y:.4g} i<extra></extra>",
      }],
      layout: {
        hovermode: "closest", showlegend: false,
        xaxis: { title: { text: chart.x }, range: [-reach, reach], zeroline: true, constrain: "domain" }, yaxis: { title: { text: "imaginary part" }, range: [-reach, reach], scaleanchor: "x", scaleratio: 1, constrain: "domain" },
        annotations: known.map((component) => ({ x: x[component], y: y[component], ax: 0, ay: 0, xref: "x", yref: "y", axref: "x", ayref: "y", showarrow: true, arrowhead: 2, arrowwidth: 1.2, arrowcolor: colour(component), text: "" })),
      },
    };
  }

  // ---- images ---------------------------------------------------------------------------------------------------------

  function cell(chart, own, row, column) {
    const view = chart.view || (chart.view = new DataView(bytes(chart.values)));
    const level = view.getUint16(2 * ((own.place * chart.rows + row) * chart.columns + column), true);
    return level === 65535 ? null : chart.low[own.layer][own.head] + (chart.spread[own.layer][own.head] * level) / 65534;
  }

  function image(chart, own, chosen) {
    if (chosen.prompt !== null && chosen.prompt !== chart.prompt) return { message: "The run keeps this map for prompt " + chart.prompt + " alone." };
    const rows = Array.from({ length: chart.rows }, (_, row) => Array.from({ length: chart.columns }, (_, column) => cell(chart, own, row, column)));
    const starts = (count) => Array.from({ length: count }, (_, block) => block * chart.size + (chart.size - 1) / 2);
    const here = chart.causal_logits && chosen.token !== null
      ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: chosen.token, y1: chosen.token, line: { color: page.colour("--ink"), width: 1, dash: "dot" } }] : [];
    return {
      traces: [{
        type: "heatmap", z: rows, x: starts(chart.columns), y: starts(chart.rows), colorscale: "Viridis", colorbar: { thickness: 10, title: { text: "logits" } },
        hoverongaps: false, hovertemplate: chart.y + " %{y}<br>" + chart.x + " %{x}: %{z:.4g}<extra></extra>",
      }],
      layout: {
        hovermode: "closest", shapes: here, margin: { l: 64, r: 10, t: 30, b: 40 }, xaxis: { title: { text: chart.x }, constrain: "domain" },
        yaxis: { title: { text: chart.y }, autorange: "reversed", scaleanchor: "x", scaleratio: 1, constrain: "domain" },
      },
    };
  }

  // Attention of the chosen token over blocks of keys: the softmax of the row of block means, each as often as it has visible keys.
  function attention(chart, chosen) {
    const own = headOf(chart, chosen);
    if (!own || chosen.token === null || chosen.prompt !== null && chosen.prompt !== chart.prompt || chosen.token >= chart.tokens) return null;
    const row = Math.floor(chosen.token / chart.size);
    const blocks = [];
    for (let column = 0; column <= Math.min(row, chart.columns - 1); column++) {
      const logit = cell(chart, own, row, column), first = column * chart.size;
      const last = Math.min(first + chart.size - 1, chosen.token);
      if (logit !== null) blocks.push({ first, last, logit });
    }
    if (!blocks.length) return null;
    const most = Math.max(...blocks.map((block) => block.logit));
    for (const block of blocks) block.share = (block.last - block.first + 1) * Math.exp(block.logit - most);
    const total = blocks.reduce((sum, block) => sum + block.share, 0);
    for (const block of blocks) block.share /= total;
    const end = Math.min(chart.tokens, (row + 1) * chart.size) - 1;
    return { blocks, size: chart.size, from: chart.size === 1 ? "token " + chosen.token : "tokens " + row * chart.size + "–" + end };
  }

  function row(chart, chosen, kind) {
    const looks = page.shown(attention(chart, chosen));
    if (!looks) return { message: chosen.token === null ? "Click a token in the explorer to see its row." : "The run keeps these logits for prompt " + chart.prompt + " alone." };
    const middle = (block) => (block.first + block.last) / 2;
    const own = headOf(chart, chosen);
    const said = looks.blocks.map((block) => (block.first === block.last ? "token " + block.first : "tokens " + block.first + "–" + block.last));
    if (kind === "attention") {
      return {
        traces: [{ type: "bar", x: looks.blocks.map(middle), y: looks.blocks.map((block) => 100 * block.share), width: looks.size, marker: { color: own.colour }, customdata: said, hovertemplate: "%{customdata}: %{y:.3g} %<extra></extra>" }],
        layout: { hovermode: "closest", xaxis: { title: { text: "key (token)" }, range: [-1, chart.tokens] }, yaxis: { title: { text: "attention (%)" }, rangemode: "tozero" } },
      };
    }
    return {
      traces: [{ type: "scatter", mode: "lines+markers", x: looks.blocks.map((block) => chosen.token - middle(block)), y: looks.blocks.map((block) => block.logit), line: { color: own.colour, width: 1 }, marker: { size: 3, color: own.colour }, customdata: said, hovertemplate: "%{customdata}: %{y:.4g}<extra></extra>" }],
      layout: { hovermode: "closest", xaxis: { title: { text: "distance (tokens)" } }, yaxis: { title: { text: "logit" } } },
    };
  }

  // ---- rows that were measured ---------------------------------------------------------------------------------------

  // The rows of the chosen prompt; null where there are none.
  const rowsOf = (chart, chosen) => chart.prompts.find((rows) => chosen.prompt === null || rows.prompt === chosen.prompt) || null;

  function strongest(chart, chosen) {
    const own = headOf(chart, chosen), kept = rowsOf(chart, chosen), query = kept ? kept.queries.indexOf(chosen.token) : -1;
    if (!own || query < 0) return null;
    const weights = kept.decodedWeights || (kept.decodedWeights = new DataView(bytes(kept.weights)));
    const keys = kept.decodedKeys || (kept.decodedKeys = new DataView(bytes(kept.keys)));
    const totals = kept.decodedTotals || (kept.decodedTotals = new DataView(bytes(kept.totals)));
    const row = own.place * kept.queries.length + query, blocks = [];
    for (let cell = row * kept.ranks; cell < (row + 1) * kept.ranks; cell++) {
      const key = keys.getInt32(4 * cell, true);
      if (key < 0) continue;
      const logarithm = chart.least * (1 - weights.getUint16(2 * cell, true) / 65534);
      blocks.push({ first: key, last: key, share: Math.exp(logarithm), logarithm });
    }
    return { blocks, size: 1, from: "token " + chosen.token, total: totals.getFloat32(4 * row, true) };
  }

  const nearest = (tokens, token) => tokens.reduce((best, one) => (Math.abs(one - token) < Math.abs(best - token) ? one : best));
  const elsewhere = (chart, chosen) => chosen.prompt !== null && chosen.prompt !== chart.prompt;

  function missingRow(chart, chosen) {
    const kept = rowsOf(chart, chosen), prompts = chart.prompts.map((rows) => rows.prompt);
    if (chosen.token === null) return "Click a token in the explorer to see its row.";
    if (!kept) return "This page holds where tokens look for prompt" + (prompts.length > 1 ? "s " : " ") + prompts.join(", ") + " alone.";
    if (!headOf(chart, chosen)) return "Where tokens look was not measured for this head.";
    return (kept.queries.length < kept.kept ? "This page has room for" : "The run keeps") + " the rows of " + kept.queries.length + " tokens; the nearest is token " + nearest(kept.queries, chosen.token) + ".";
  }

  function bars(chart, chosen) {
    const looks = page.shown(strongest(chart, chosen));
    if (!looks) return { message: missingRow(chart, chosen) };
    const held = looks.blocks.reduce((sum, block) => sum + block.share, 0);
    return {
      message: "the " + looks.blocks.length + " strongest keys hold " + digits(100 * held) + " %",
      traces: [{ type: "bar", x: looks.blocks.map((block) => block.first), y: looks.blocks.map((block) => 100 * block.share), marker: { color: headOf(chart, chosen).colour }, hovertemplate: "token %{x}: %{y:.3g} %<extra></extra>" }],
      layout: { hovermode: "closest", bargap: 0, xaxis: { title: { text: "key (token)" }, range: [-1, Math.max(...rowsOf(chart, chosen).queries) + 1] }, yaxis: { title: { text: "attention (%)" }, rangemode: "tozero" } },
    };
  }

  function byDistance(chart, chosen) {
    const looks = strongest(chart, chosen);
    if (!looks) return { message: missingRow(chart, chosen) };
    const keys = looks.blocks.slice().sort((a, b) => b.first - a.first);
    const whole = keys.length === chosen.token + 1;
    return {
      message: whole ? "every key that it sees" : "the " + keys.length + " strongest keys",
      traces: [{
        type: "scatter", mode: whole ? "lines+markers" : "markers", x: keys.map((key) => chosen.token - key.first), y: keys.map((key) => looks.total + key.logarithm),
        customdata: keys.map((key) => key.first), line: { width: 1, color: headOf(chart, chosen).colour }, marker: { size: 5, color: headOf(chart, chosen).colour },
        hovertemplate: "token %{customdata}, distance %{x}: %{y:.4g}<extra></extra>",
      }],
      layout: { hovermode: "closest", xaxis: { title: { text: "distance (tokens)" } }, yaxis: { title: { text: "logit" } } },
    };
  }

  // ---- next tokens ----------------------------------------------------------------------------------------------------

  function expected(chart, chosen) {
    const row = elsewhere(chart, chosen) ? -1 : chart.tokens.indexOf(chosen.token);
    if (row < 0) return null;
    const next = chart.texts[row].map((text, rank) => ({ text, share: chart.probabilities[row][rank] }));
    return { next, following: chart.following[row] };
  }

  function nextTokens(chart, chosen) {
    if (chosen.token === null) return { message: "Click a token in the explorer to see what is expected after it." };
    const found = expected(chart, chosen);
    if (!found) {
      return { message: elsewhere(chart, chosen) ? "Next tokens are kept for prompt " + chart.prompt + " alone." : "Next tokens are kept after " + chart.tokens.length + " tokens; the nearest is token " + nearest(chart.tokens, chosen.token) + "." };
    }
    const shown = found.next.slice().reverse(), places = shown.map((_, place) => place);
    return {
      message: found.following === null ? "the prompt ends here" : "the token that does follow has " + digits(100 * found.following) + " %",
      traces: [{ type: "bar", orientation: "h", y: places, x: shown.map((one) => 100 * one.share), marker: { color: page.colour("--mark") }, hovertemplate: "%{x:.4g} %<extra></extra>" }],
      layout: {
        hovermode: "closest", margin: { l: 110, r: 10, t: 28, b: 40 }, xaxis: { title: { text: "probability (%)" }, rangemode: "tozero" },
        yaxis: { tickmode: "array", tickvals: places, ticktext: shown.map((one) => page.written(one.text)), automargin: true },
      },
    };
  }

  // ---- the whole ------------------------------------------------------------------------------------------------------

  function panel(label, describe, className) {
    const chart = made("div", { className: "plot " + (className || "") }), message = made("p", { className: "panel-note" });
    const element = made("article", { className: "panel" }, made("h4", {}, label), message, chart);
    grid.append(element);
    drawn.push((chosen) => {
      const described = describe(chosen) || { message: "This is not kept of this head, or its layer has no such thing." };
      message.textContent = described.message || "";
      chart.hidden = !described.traces;
      if (described.traces) Plotly.react(chart, described.traces, page.layout(Object.assign({ margin: { l: 64, r: 10, t: 28, b: 40 } }, described.layout)), page.config);
    });
  }

  function draw(chosen) {
    title.hidden = charts.every((chart) => chart.kind === "next");
    title.textContent = "Layer " + chosen.layer + ", head " + chosen.head;
    const told = charts.filter((chart) => chart.kind === "number").map((chart) => {
      const own = headOf(chart, chosen), prompt = chosen.prompt === null ? 0 : chart.prompts.indexOf(chosen.prompt);
      return chart.title + ": " + (own && prompt >= 0 ? digits(chart.values[prompt][own.layer * chart.heads.length + own.head]) + " (prompt " + chart.prompts[prompt] + ")" : "–");
    });
    numbers.textContent = told.join("; ");
    drawn.forEach((one) => one(chosen));
  }

  place.append(title, numbers, grid);
  place.hidden = false;
  for (const chart of charts) {
    if (chart.kind === "curves" || chart.kind === "arrows") {
      const describe = chart.kind === "curves" ? curves : arrows;
      panel(chart.title, (chosen) => { const own = headOf(chart, chosen); return own && describe(chart, own); }, chart.kind === "arrows" ? "square" : "");
    }
    if (chart.kind === "rows") {
      const before = page.attention;
      page.attention = (chosen) => strongest(chart, chosen) || before(chosen);
      page.attentionMissing = (chosen) => missingRow(chart, chosen);
      page.nearestRow = (chosen) => (chosen.token === null || !rowsOf(chart, chosen) || !headOf(chart, chosen) ? null : nearest(rowsOf(chart, chosen).queries, chosen.token));
      page.rowsAreMeasured = true;
      panel(chart.title, (chosen) => bars(chart, chosen));
      panel("Logits of the chosen token by distance", (chosen) => byDistance(chart, chosen));
    }
    if (chart.kind === "next") {
      page.predictions = (chosen) => expected(chart, chosen);
      panel(chart.title, (chosen) => nextTokens(chart, chosen));
    }
    if (chart.kind !== "image") continue;
    const blocks = chart.size > 1 ? ", a pixel is the mean over " + chart.size + " × " + chart.size + " pairs" : "";
    panel(chart.title + " of prompt " + chart.prompt + blocks, (chosen) => { const own = headOf(chart, chosen); return own && image(chart, own, chosen); }, "square");
    if (!chart.causal_logits) continue;
    const before = page.attention;
    page.attention = (chosen) => before(chosen) || attention(chart, chosen);
    if (!page.rowsAreMeasured) page.attentionMissing = () => "Where it looks is kept for prompt " + chart.prompt + " alone, and for the heads of the logit maps.";
    panel("Attention of the chosen token" + (chart.size > 1 ? ", estimated from block means" : ""), (chosen) => headOf(chart, chosen) && row(chart, chosen, "attention"));
    panel("Logits of the chosen token by distance" + (chart.size > 1 ? ", means over blocks" : ""), (chosen) => headOf(chart, chosen) && row(chart, chosen, "logits"));
  }

  let waiting = null, seen = false;
  const follow = () => { if (waiting && seen) { const chosen = waiting; waiting = null; draw(chosen); } };
  // Charts are drawn when they come into view, since every key press chooses another token.
  new IntersectionObserver((entries) => { seen = entries[entries.length - 1].isIntersecting; follow(); }, { rootMargin: "300px" }).observe(place);
  for (const name of ["head-chosen", "token-chosen"]) page.events.addEventListener(name, (event) => { waiting = event.detail; follow(); });
  page.onTheme.push(() => { waiting = page.chosen(); follow(); });
  page.onPrint.push(() => { if (waiting) { const chosen = waiting; waiting = null; draw(chosen); } });
};
