// The explorer: one state, one list of requests, and what draws each part. Every number is an answer of a source (sources.js).
//
//     state -> message -> answer -> drawn          a change of the state asks anew; of two answers the newer is drawn
//
// The state is in the address after #, so that a page that is opened again shows the same.
import { HEADS, attention, byState, curve, distances, draggable, number, percent, positions, readable, save, visible } from "./charts.js";

const QUICK = 64 * 256; // heads times tokens up to which edits are suggested unasked
const MOST_SHOWN = 6; // heads side by side
const KINDS = {
  linearised: { says: "the token index" },
  frozen: { says: "one constant", field: "value", label: "position", free: true },
  copied: { says: "the position of a token", field: "source", label: "token" },
  permuted: { says: "shuffled", field: "seed", label: "seed" },
  scaled: { says: "scaled", field: "value", label: "factor" },
  shifted: { says: "shifted", field: "value", label: "by (positions)" },
};
const EMPTY = { prompt: 0, text: null, heads: [], token: null, selection: null, answer: [], edits: [], score: "", heat: "clean" };

function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const button = (text, act, properties = {}) => el("button", { type: "button", textContent: text, onclick: act, ...properties });
const field = (text, control) => el("label", {}, text + " ", control);
const option = (value, text) => el("option", { value, textContent: text });
const nameOf = ([layer, head]) => "L" + layer + " H" + head;
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

export function explore(root, source, addressed = true) {
  let model, prompt, view, state = { ...EMPTY };
  let past = [], future = [], stop = null, asking = 0;
  const part = {};

  // ---- the frame ------------------------------------------------------------------------------------------------------

  function frame() {
    const plot = (name, properties = {}) => (part[name] = el("div", { className: "plot", ...properties }));
    const saved = (name) => el("span", { className: "saves" }, ...["svg", "png"].map((format) => button(format.toUpperCase(), () => save(part[name], format, name), { className: "small", "aria-label": "Save " + name + " as " + format.toUpperCase() })));
    const section = (title, ...children) => el("section", { "aria-label": title }, el("h2", { textContent: title }), ...children);
    part.banner = el("p", { className: "banner", role: "alert", hidden: true });
    part.refused = el("p", { className: "refused", role: "alert", hidden: true });
    part.title = el("h1", { textContent: "Explorer" });
    part.busy = el("output", { className: "busy", "aria-live": "polite" });
    part.prompts = el("select", { onchange: () => restart({ prompt: Number(part.prompts.value), text: null }) });
    part.own = el("textarea", { rows: 3, spellcheck: false, "aria-label": "Your own text" });
    part.read = button("Read this text", () => restart({ text: part.own.value }));
    part.score = el("select", { onchange: () => update({ score: part.score.value }) });
    part.map = el("div", { className: "map", role: "group", "aria-label": "Heads; Shift adds a head to those that are shown" });
    part.scale = el("p", { className: "hint" });
    part.atlas = el("details", { hidden: true });
    part.where = el("select");
    part.which = el("select");
    part.kind = el("select", { onchange: drawField }, ...Object.entries(KINDS).map(([kind, { says }]) => option(kind, says)));
    part.value = el("input", { type: "number", step: "any" });
    part.valued = el("label", {}, el("span"), " ", part.value);
    part.edits = el("ol", { className: "edits" });
    part.undo = button("Undo", undo, { title: "Ctrl+Z" });
    part.redo = button("Redo", redo, { title: "Ctrl+Y" });
    part.suggestions = el("div", { className: "suggestions", "aria-live": "polite" });
    part.suggest = button("Which positions does the answer need?", suggest);
    part.heat = el("select", { onchange: () => update({ heat: part.heat.value }) }, option("clean", "as it is"), option("changed", "changed"), option("difference", "difference"));
    part.text = el("div", { className: "text", tabIndex: 0, role: "group", "aria-label": "The prompt; arrow keys choose a token, with Shift they select", lang: "", dir: "auto", onkeydown: keys });
    part.said = el("p", { className: "said", "aria-live": "polite" });
    part.mass = el("div", { className: "scroll" });
    part.next = el("div", { className: "scroll" });
    part.answered = el("p", { className: "said", "aria-live": "polite" });
    part.clean = el("p", { className: "continued", lang: "", dir: "auto" });
    part.changed = el("p", { className: "continued", lang: "", dir: "auto" });
    part.goes = el("input", { type: "checkbox", checked: true });
    part.told = el("output", { className: "hint", "aria-live": "polite" });
    part.python = el("pre", { tabIndex: 0, hidden: true });
    root.replaceChildren(
      el("header", {}, part.title, part.busy, part.banner, part.refused, el("div", { className: "controls" },
        field("Prompt", part.prompts), button("Copy as Python", python), button("CSV", () => file("csv")), button("netCDF", () => file("netcdf")), part.told),
        el("details", {}, el("summary", { textContent: "Your own text" }), part.own, part.read), part.python),
      el("div", { className: "columns" },
        el("div", {},
          section("Heads", el("div", { className: "controls" }, field("Colour by", part.score)), part.map, part.scale, part.atlas),
          section("Edits", part.suggestions, el("div", { className: "controls" }, part.suggest),
            el("div", { className: "controls" }, field("Give", part.where), field("for", part.which), field("", part.kind), part.valued, button("Add edit", add)),
            el("div", { className: "controls" }, part.undo, part.redo), part.edits),
          section("Answer", part.answered, el("div", { className: "controls" }, button("The selected tokens are the answer", () => update({ answer: range(state.selection) })), button("The prompt's answer", () => update({ answer: [] }))), plot("answer"), saved("answer")),
          section("Next tokens", part.next)),
        el("div", {},
          section("Prompt", el("div", { className: "controls" }, field("Shade by attention", part.heat)), part.text, part.said, part.mass),
          section("Continuation", el("div", { className: "controls" }, button("Continue", go), button("Stop", () => stop && stop.abort()), el("label", {}, part.goes, " after every change")), part.clean, part.changed),
          section("Positions", el("p", { className: "hint", textContent: "Drag a point to give its token another position. With the chart focused: ← → choose the token, ↑ ↓ move it." }), plot("positions", { tabIndex: 0, role: "application", "aria-label": "Positions of the chosen heads", onkeydown: keys }), saved("positions")),
          section("Attention of the chosen token", plot("attention"), saved("attention")),
          section("Logits by distance", plot("logits"), saved("logits")))));
    draggable(part.positions, () => view && view.numbers, move);
  }

  // ---- the state and its requests -------------------------------------------------------------------------------------

  function message(ask, further = {}) {
    const { prompt, text, heads, token, selection, answer, edits } = state;
    return { ask, prompt, text, heads, token: token ?? 0, selection, answer, edits, ...further };
  }

  // The answer; null where a newer message took its place, or the source is gone; false where it was refused, which is shown.
  async function answered(ask) {
    asking += 1;
    part.busy.textContent = "working …";
    try {
      const answer = await source.ask(message(ask));
      if (answer) part.refused.hidden = true;
      return answer;
    } catch (error) {
      if (!error.refused) throw error;
      refuse(error.message);
      return false;
    } finally {
      asking -= 1;
      if (!asking) part.busy.textContent = "";
    }
  }

  function refuse(line) {
    part.refused.textContent = line;
    part.refused.hidden = false;
  }

  // Change the state and draw what follows; what is refused is taken back.
  async function update(changes, keep = true) {
    const before = state;
    if (changes.edits && keep && !same(changes.edits, state.edits)) {
      past.push(state.edits);
      future = [];
    }
    state = { ...state, ...changes };
    const on = state.edits.some((edit) => edit.on !== false);
    if (!on) state.heat = "clean";
    else if (!before.edits.some((edit) => edit.on !== false) && state.heat === "clean") state.heat = "difference";
    const answer = await answered("view");
    if (answer === false) revert(before);
    if (!answer) return answer;
    view = answer;
    if (addressed) history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(Object.fromEntries(Object.entries(state).filter(([name, value]) => !same(value, EMPTY[name]))))));
    drawAll();
    if (changes.edits && part.goes.checked && prompt.start) go();
    return answer;
  }

  function revert(before) {
    state = before;
    if (past.length && same(past[past.length - 1], before.edits)) past.pop();
    if (prompt && view) drawAll();
  }

  async function restart(changes) {
    const wanted = { ...EMPTY, score: state.score, ...changes };
    const before = state;
    state = wanted;
    const answer = await answered("prompt");
    if (answer === false) state = before;
    if (!answer) return answer;
    prompt = answer;
    view = null;
    const sound = (tokens) => tokens.every((token) => Number.isInteger(token) && token >= 0 && token < prompt.tokens.length);
    state.heads = state.heads.length ? state.heads : [prompt.head];
    state.token = state.token !== null && sound([state.token]) ? state.token : prompt.token;
    if (state.selection && !sound(state.selection)) state.selection = null;
    if (!(state.score in prompt.heads.scores)) state.score = prompt.score;
    past = [];
    future = [];
    part.suggestions.replaceChildren();
    part.clean.replaceChildren();
    part.changed.replaceChildren();
    drawPrompt();
    const first = await update({});
    if (!first) return first;
    const heads = model.layers.reduce((sum, layer) => sum + layer.heads, 0);
    if (part.goes.checked) go();
    if (!state.edits.length && model.movable.length && heads * prompt.tokens.length <= QUICK) suggest();
    return true;
  }

  function undo() {
    if (!past.length) return;
    future.push(state.edits);
    update({ edits: past.pop() }, false);
  }

  function redo() {
    if (!future.length) return;
    past.push(state.edits);
    update({ edits: future.pop() }, false);
  }

  const range = (selection) => (selection ? Array.from({ length: selection[1] - selection[0] + 1 }, (_, place) => selection[0] + place) : []);

  // ---- edits ----------------------------------------------------------------------------------------------------------

  function drawField() {
    const { field: name, label } = KINDS[part.kind.value];
    part.valued.hidden = !name;
    part.valued.firstChild.textContent = label || "";
    part.value.placeholder = KINDS[part.kind.value].free ? "the mean" : "";
  }

  function drawForm() {
    const groups = model.atlas ? [...new Set(model.atlas.rows.flatMap((row) => String(row[model.atlas.columns.indexOf("name")] || "").split(", ")))].filter((name) => name).sort() : [];
    const layers = model.movable.map((layer) => option("layer:" + layer, "layer " + layer));
    const chosen = part.where.value, tokens = part.which.value;
    part.where.replaceChildren(option("shown", state.heads.map(nameOf).join(", ")), ...layers, ...groups.map((name) => option("group:" + name, "heads named " + name)));
    part.which.replaceChildren(option("", "all tokens"), option("token", "token " + state.token), ...(state.selection ? [option("selection", "tokens " + state.selection.join("–"))] : []), ...Object.keys(prompt.spans).map((name) => option("span:" + name, "span " + name)));
    for (const [select, value] of [[part.where, chosen], [part.which, tokens]]) if ([...select.options].some((one) => one.value === value)) select.value = value;
  }

  function add() {
    const [where, name] = part.where.value.split(/:(.*)/s), [which, span] = part.which.value.split(/:(.*)/s);
    const edit = { kind: part.kind.value };
    if (where === "layer") edit.layer = Number(name);
    else if (where === "group") edit.heads = groupOf(name);
    else edit.heads = state.heads;
    if (which === "token") edit.tokens = [state.token];
    if (which === "selection") edit.tokens = range(state.selection);
    if (which === "span") edit.span = span;
    const { field: parameter } = KINDS[edit.kind];
    if (parameter && part.value.value !== "") edit[parameter] = Number(part.value.value);
    update({ edits: [...state.edits, edit] });
  }

  function groupOf(name) {
    const { columns, rows } = model.atlas, at = (column) => columns.indexOf(column);
    return rows.filter((row) => String(row[at("name")]).split(", ").includes(name)).map((row) => [row[at("layer")], row[at("head")]]);
  }

  // Give one token of one head another position; a second move of the same takes the place of the first.
  function move(shown, token, value) {
    const edit = { kind: "frozen", heads: [state.heads[shown]], tokens: [token], value: Number(value.toPrecision(6)) };
    const last = state.edits[state.edits.length - 1];
    const again = last && last.on !== false && same({ ...last, value: 0 }, { ...edit, value: 0 });
    update({ edits: [...(again ? state.edits.slice(0, -1) : state.edits), edit], token });
  }

  function drawEdits() {
    const sentences = (view && view.sentences) || [];
    part.edits.replaceChildren(...state.edits.map((edit, place) => {
      const says = sentences[place] || edit.kind;
      const on = el("input", { type: "checkbox", checked: edit.on !== false, onchange: () => update({ edits: state.edits.map((one, other) => (other === place ? { ...one, on: on.checked } : one)) }) });
      const remove = button("Remove", () => update({ edits: state.edits.filter((_, other) => other !== place) }), { className: "small", "aria-label": "Remove " + says });
      return el("li", {}, el("label", {}, on, " " + says), remove);
    }));
    part.undo.disabled = !past.length;
    part.redo.disabled = !future.length;
  }

  async function suggest() {
    part.suggest.disabled = true;
    const mine = prompt;
    part.suggestions.replaceChildren(el("p", { className: "hint", textContent: "looking for the positions that the answer needs …" }));
    const take = ({ suggested }) => {
      if (mine !== prompt) return;
      part.suggestions.replaceChildren(
        el("p", { className: "hint", textContent: suggested.length ? "The answer loses most by these edits:" : "No single head or layer is needed for this answer." }),
        ...suggested.map(({ edit, sentence, effect }) => button(sentence.replace(/^(.*): the token index$/, "give $1 the token index") + " (" + number(effect) + " nat)", () => update({ edits: [...state.edits, edit] }), { className: "suggested" })));
    };
    try {
      await source.events(message("suggest"), take, new AbortController().signal);
    } catch (error) {
      if (!error.refused) throw error;
      part.suggestions.replaceChildren(el("p", { className: "refused", textContent: error.message }));
    }
    part.suggest.disabled = false;
  }

  // ---- the continuation -----------------------------------------------------------------------------------------------

  async function go() {
    if (stop) stop.abort();
    const mine = (stop = new AbortController());
    const lines = { clean: part.clean, changed: part.changed };
    const edited = state.edits.some((edit) => edit.on !== false);
    part.clean.replaceChildren(el("b", { textContent: edited ? "As it is: " : "" }));
    part.changed.replaceChildren(...(edited ? [el("b", { textContent: "Changed: " })] : []));
    const take = (event) => {
      if (mine.signal.aborted) return;
      const kind = event.right === null ? "" : event.right ? "right" : "wrong";
      lines[event.state].append(el("span", { textContent: readable(event.text), className: kind, title: kind && kind + ", by the answer of the prompt" }), prompt.joint);
    };
    try {
      await source.events(message("continue"), take, mine.signal);
    } catch (error) {
      if (!error.refused) throw error;
      part.changed.append(el("span", { className: "refused", textContent: error.message }));
    }
  }

  // ---- what is drawn --------------------------------------------------------------------------------------------------

  function outline(points) {
    const known = points.filter((value) => value !== null), low = Math.min(...known), reach = Math.max(...known) - low || 1;
    const path = points.map((value, place) => (value === null ? "" : (place ? "L" : "M") + ((40 * place) / (points.length - 1 || 1)).toFixed(1) + " " + (15 - (14 * (value - low)) / reach).toFixed(1))).join("");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.setAttribute("viewBox", "0 0 40 16");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    line.setAttribute("d", path.replace(/^L/, "M"));
    svg.append(line);
    return svg;
  }

  function drawMap() {
    const heads = (view && view.heads) || prompt.heads, score = heads.scores[state.score], most = Math.max(...model.layers.map((layer) => layer.heads));
    part.map.style.setProperty("--heads", most);
    const cells = model.layers.flatMap((layer, row) => [
      el("span", { className: "row", textContent: "L" + layer.layer + " " + layer.name }),
      ...Array.from({ length: most }, (_, head) => {
        if (head >= layer.heads) return el("span");
        const value = score.values[row][head], pair = [layer.layer, head], shown = state.heads.findIndex((one) => same(one, pair));
        const cell = button("", (event) => choose(pair, event.shiftKey), { title: nameOf(pair) + ", " + state.score + ": " + number(value), "aria-label": nameOf(pair) + ", " + state.score + " " + number(value), "aria-pressed": String(shown >= 0) });
        cell.dataset.head = pair.join(".");
        cell.style.setProperty("--score", score.colours[row][head]);
        if (shown >= 0) cell.style.setProperty("--chosen", HEADS[shown]);
        cell.append(outline(heads.outlines[row][head]));
        return cell;
      }),
    ]);
    part.map.replaceChildren(...cells);
    part.scale.textContent = state.score + ": " + score.ends.map(number).join(" to ") + (view && view.heads ? ", under the edits" : "") + ". Drawn: positions, each on its own scale. Shift-click shows several heads.";
    const focus = part.focus && part.map.querySelector("[data-head='" + part.focus + "']");
    if (focus) focus.focus();
    part.focus = null;
  }

  function choose(pair, more) {
    const shown = state.heads.some((one) => same(one, pair));
    const left = state.heads.filter((one) => !same(one, pair));
    part.focus = pair.join(".");
    update({ heads: !more ? [pair] : shown && left.length ? left : shown ? state.heads : [...state.heads, pair].slice(-MOST_SHOWN) });
  }

  function drawAtlas() {
    part.atlas.hidden = !model.atlas;
    if (!model.atlas) return;
    const { columns, rows } = model.atlas;
    const body = rows.map((row) => {
      const pair = [row[columns.indexOf("layer")], row[columns.indexOf("head")]];
      return el("tr", {}, el("td", {}, button(nameOf(pair), (event) => choose(pair, event.shiftKey), { className: "small" })), ...row.slice(2).map((cell) => el("td", { textContent: typeof cell === "number" ? number(cell) : cell ?? "" })));
    });
    part.atlas.replaceChildren(el("summary", { textContent: "Atlas of the run" }), el("div", { className: "scroll tall" }, el("table", {}, el("thead", {}, el("tr", {}, ...["head", ...columns.slice(2)].map((name) => el("th", { textContent: name.replaceAll("_", " ") })))), el("tbody", {}, ...body))));
  }

  function drawPrompt() {
    part.prompts.replaceChildren(...model.prompts.map((count, place) => option(place, place + " (" + count + " tokens)")), ...(state.text === null ? [] : [option("", "your own text")]));
    part.prompts.value = state.text === null ? state.prompt : "";
    part.own.value = state.text ?? part.own.value;
    const colours = {};
    for (const { at, colour } of Object.values(prompt.spans)) for (const [first, last] of at) for (let token = first; token <= last; token++) colours[token] = colour;
    part.tokens = prompt.tokens.map((text, token) => {
      const node = el("span", { textContent: readable(text) });
      node.dataset.token = token;
      if (colours[token]) node.style.setProperty("--span", colours[token]);
      return node;
    });
    part.text.replaceChildren(...part.tokens.flatMap((node, token) => (token && prompt.joint ? [" ", node] : prompt.tokens[token].includes("\n") ? [node, el("br")] : [node])));
    part.score.replaceChildren(...Object.keys(prompt.heads.scores).map((name) => option(name, name)));
    part.score.value = state.score;
  }

  function drawText() {
    const rows = { ...byState(view.numbers.weight) };
    if (view.numbers.weight_difference) rows.difference = view.numbers.weight_difference.values;
    const weights = (rows[state.heat] || rows.clean)[0], most = Math.max(...weights.map(Math.abs), 1e-9);
    part.heat.value = state.heat in rows ? state.heat : "clean";
    part.tokens.forEach((node, token) => {
      const weight = weights[token] || 0;
      node.style.setProperty("--heat", (80 * Math.sqrt(Math.abs(weight) / most)).toFixed(1) + "%");
      node.classList.toggle("less", weight < 0);
      node.classList.toggle("chosen", token === state.token);
      node.classList.toggle("selected", Boolean(state.selection) && state.selection[0] <= token && token <= state.selection[1]);
      node.classList.toggle("answer", (state.answer.length ? state.answer : prompt.answer).includes(token));
    });
    const at = part.tokens[state.token].offsetTop - part.text.scrollTop;
    if (at < 0 || at > part.text.clientHeight - 24) part.text.scrollTop += at - part.text.clientHeight / 2;
    part.said.textContent = "Token " + state.token + " (" + visible(prompt.tokens[state.token]) + "), where " + nameOf(state.heads[0]) + " looks. Click a token; drag over tokens to select them.";
    const spans = view.numbers.span.values, mass = byState(view.numbers.span_mass);
    const states = Object.keys(mass);
    part.mass.replaceChildren(el("table", {}, el("caption", { textContent: "Attention to spans (%)" }), el("thead", {}, el("tr", {}, el("th", { textContent: "head" }), ...spans.map((name) => el("th", { textContent: name })))),
      el("tbody", {}, ...state.heads.flatMap((pair, shown) => states.map((which) => el("tr", {}, el("th", { scope: "row", textContent: nameOf(pair) + (which === "changed" ? ", changed" : "") }), ...mass[which][shown].map((value) => el("td", { className: "number", textContent: percent(value) }))))))));
  }

  function drawNext() {
    const texts = view.numbers.next_text ? byState(view.numbers.next_text) : byState(view.numbers.next_token), shares = byState(view.numbers.probability);
    const states = Object.keys(texts);
    const columns = states.flatMap((which) => [which === "clean" ? "as it is" : "changed", "%"]);
    const rows = texts.clean.map((_, rank) => el("tr", {}, ...states.flatMap((which) => [el("td", { className: "token", textContent: visible(String(texts[which][rank])) }), el("td", { className: "number", textContent: percent(shares[which][rank]) })])));
    part.next.replaceChildren(el("table", {}, el("caption", { textContent: "After token " + state.token }), el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { textContent: name })))), el("tbody", {}, ...rows)));
  }

  function drawAnswer() {
    const values = view.numbers.log_probability.values, scores = view.numbers.score.values;
    const both = (given) => (Array.isArray(given) ? given.map(number).join(" → ") : number(given));
    const marked = state.answer.length || prompt.answer.length;
    part.answered.textContent = (marked === 1 ? "1 token" : marked + " tokens") + ", bold in the prompt: log-probability " + both(values) + " nat, score " + both(scores);
    curve(part.answer, view.numbers, state.edits.map((edit, place) => view.sentences[place]).filter((_, place) => state.edits[place].on !== false));
  }

  function drawAll() {
    drawMap();
    drawForm();
    drawEdits();
    drawText();
    drawNext();
    drawAnswer();
    positions(part.positions, view.numbers, state, prompt.tokens);
    attention(part.attention, view.numbers, state, prompt.tokens);
    distances(part.logits, view.numbers, state);
  }

  // ---- keys and pointers ----------------------------------------------------------------------------------------------

  function keys(event) {
    const last = prompt.tokens.length - 1, step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -16, PageDown: 16 }[event.key];
    const goal = event.key === "Home" ? 0 : event.key === "End" ? last : step === undefined ? null : Math.min(last, Math.max(0, state.token + step));
    const up = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (goal !== null && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      const anchor = event.shiftKey ? (state.anchor ?? state.token) : null;
      update({ token: goal, anchor: anchor ?? undefined, selection: anchor === null ? state.selection : [Math.min(anchor, goal), Math.max(anchor, goal)] });
    } else if (up && event.currentTarget === part.positions) {
      event.preventDefault();
      const rows = byState(view.numbers.position), value = (rows.changed || rows.clean)[0][state.token];
      if (value !== null) move(0, state.token, value + up * (event.shiftKey ? 0.1 : 1));
    } else if (event.key === "Escape") update({ selection: null });
  }

  function pointers() {
    let first = null;
    const tokenAt = (event) => {
      const node = event.target.closest ? event.target.closest("[data-token]") : null;
      return node ? Number(node.dataset.token) : null;
    };
    part.text.addEventListener("pointerdown", (event) => { first = tokenAt(event); });
    part.text.addEventListener("pointerup", (event) => {
      const last = tokenAt(event);
      if (first === null || last === null) return;
      if (event.shiftKey) update({ selection: [Math.min(state.token, last), Math.max(state.token, last)] });
      else if (first === last) update({ token: last });
      else update({ selection: [Math.min(first, last), Math.max(first, last)] });
      first = null;
    });
    root.addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.target.matches("input, textarea")) return;
      const act = event.key === "y" || (event.key === "Z" && event.shiftKey) ? redo : event.key === "z" ? undo : null;
      if (act) { event.preventDefault(); act(); }
    });
  }

  // ---- what is kept ---------------------------------------------------------------------------------------------------

  async function python() {
    const answer = await answered("python");
    if (!answer) return;
    part.python.textContent = answer.python;
    part.python.hidden = false;
    try { await navigator.clipboard.writeText(answer.python); part.told.textContent = "copied"; } catch { part.told.textContent = "select and copy it below"; }
  }

  async function file(kind) {
    const answer = await answered(kind);
    if (!answer) return;
    const bytes = Uint8Array.from(atob(answer.base64), (character) => character.charCodeAt(0));
    const link = el("a", { href: URL.createObjectURL(new Blob([bytes])), download: answer.name });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // ---- the whole ------------------------------------------------------------------------------------------------------

  // What the address says; nothing where it says no state.
  function ofAddress() {
    try {
      const given = JSON.parse(decodeURIComponent(location.hash.slice(1)));
      const fits = (name) => name in given && Array.isArray(given[name]) === (Array.isArray(EMPTY[name]) || (name === "selection" && given[name] !== null));
      return Object.fromEntries(Object.keys(EMPTY).filter(fits).map((name) => [name, given[name]]));
    } catch {
      return {};
    }
  }

  async function begin() {
    const opened = await answered("open");
    if (!opened) return;
    model = opened;
    part.title.textContent = "Explorer: " + (model.checkpoint || "a model");
    part.own.disabled = part.read.disabled = !model.reads_text;
    drawAtlas();
    drawField();
    const given = prompt ? state : addressed ? ofAddress() : {};
    if ((await restart(given)) === false) {
      const said = part.refused.textContent;
      await restart({});
      refuse(said);
    }
    root.dataset.alive = "";
  }

  source.onLost = () => {
    part.banner.textContent = "The server does not answer. Start repo-interp explore again; this page tries every second.";
    part.banner.hidden = false;
  };
  source.onFound = () => {
    part.banner.hidden = true;
    begin();
  };
  frame();
  pointers();
  if (addressed) window.addEventListener("hashchange", () => restart(ofAddress()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view && drawAll());
  begin();
}
