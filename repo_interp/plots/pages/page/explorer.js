// The explorer: one state, one list of requests, and what draws each part. Every number is an answer of a source (sources.js).
//
//     state -> message -> answer -> drawn          a change of the state asks anew; of two answers the newer is drawn
//     shown                                        the state of the answers that are drawn, until the next answer comes
//
// The state is in the address after #, so that a page that is opened again shows the same.
import { HEADS, attention, byState, curve, distances, draggable, orders, overview, positions, save, seen, shadedSpans } from "./charts.js";
import { button, bytesOf, el, field, holds, nameOf, number, option, percent, readable, same, visible } from "./dom.js";
import { LOOKING, lookingLine, lookingMap } from "./looking.js";
import { MAP, headMap } from "./map.js";
import { headTable } from "./table.js";
import { tour } from "./tour.js";

// A share of attention below which a sentence does not name a token; nats below which an edit changes nothing.
const LEAST_SHARE = 1e-3, LEAST_NATS = 0.01;
const QUICK = 64 * 256; // heads times tokens up to which edits are suggested unasked
const MOST_SHOWN = 6; // heads side by side
const MOST_TEXT = 1500; // tokens of text that stand in the page at a time
const AROUND = 40; // tokens shown on either side of a token that is zoomed to
const range = (selection) => (selection ? Array.from({ length: selection[1] - selection[0] + 1 }, (_, place) => selection[0] + place) : []);
// The numbers of "0-3, 7"; a part that is none stays a text, which the server refuses.
const numbersOf = (text) => text.split(",").flatMap((part) => {
  const [, first, last = first] = /^\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?$/.exec(part) || [];
  return first ? range([Number(first), Number(last)]) : [part];
});
// Edits by their name in the form, below those of positions, which the source names: `kind` where it has another one; `read` gives its field
// the text, and the pairs of the first layer; `as`: which of the edits that the server has tried says why a layer does not take it.
const FORM = {
  Frequencies: {
    linear: { says: "frequencies divided by a factor", field: "value", label: "factor", as: "linear" },
    ntk: { says: "NTK-aware frequencies", field: "value", label: "factor", as: "linear" },
    yarn: { says: "YaRN's frequencies", field: "value", label: "factor", as: "yarn" },
    slowest: { kind: "stopped", says: "frequency 0 for the slowest pairs", field: "pairs", label: "how many", as: "linear", read: (count, all) => range([Math.max(-1, all - count), all - 1]) },
    fastest: { kind: "stopped", says: "frequency 0 for the fastest pairs", field: "pairs", label: "how many", as: "linear", read: (count, all) => range([0, Math.min(all, count - 1)]) },
  },
  Ablation: {
    zero_ablated: { says: "output 0", as: "output" },
    mean_ablated: { says: "the mean output", as: "output" },
    pairs_ablated: { says: "queries 0 in rotary pairs", field: "pairs", label: "pairs (0 is the fastest)", hint: "0-3, 7", as: "linear", read: numbersOf },
    pairs_mean_ablated: { says: "mean queries and keys in rotary pairs", field: "pairs", label: "pairs (0 is the fastest)", hint: "0-3, 7", as: "linear", read: numbersOf },
  },
};
const RANGES = { own: "each head its own", global: "the same for all", focused: "without what lies far outside" };
const EMPTY = { prompt: 0, text: null, heads: [], token: null, selection: null, looking: "token", answer: [], edits: [], heat: "clean", range: "own", view: null, sink: false, against: null, ...MAP };

// `addressed`: whether the state is in the address; `first`: what is chosen when it opens; `compare` shows what stands at the side. Returns
// how others change the state, and `events`: "drawn" after each drawing, "chosen" where `chosen()` is new.
export function explore(root, source, { addressed = true, first = {}, compare = null }) {
  let model, prompt, view, kinds = {}, state = { ...EMPTY }, shown = state, told = null;
  let turn = 0, begun = 0, opening = 0; // views and prompts that were asked for, and prompts whose answer has not come
  const events = new EventTarget();
  let past = [], future = [], stop = null, asking = 0;
  const part = {};

  // ---- the frame ------------------------------------------------------------------------------------------------------

  function frame() {
    const live = (control) => (source.how ? null : control); // what a source without a model does not answer
    const plot = (name, properties = {}) => (part[name] = el("div", { className: "plot", ...properties }));
    const saved = (name) => el("span", { className: "saves" }, ...["svg", "png"].map((format) => button(format.toUpperCase(), () => save(part[name], format, name), { className: "small", "aria-label": "Save " + name + " as " + format.toUpperCase() })));
    const section = (title, ...children) => el("section", { "aria-label": title }, el("h2", { textContent: title }), ...children);
    part.banner = el("p", { className: "banner", role: "alert", hidden: true });
    part.refused = el("p", { className: "refused", role: "alert", hidden: true });
    part.title = el("h1", { textContent: "Explorer" });
    part.busy = el("output", { className: "busy", "aria-live": "polite" });
    part.prompts = el("select", { onchange: () => restart({ prompt: Number(part.prompts.value), text: null, heads: state.heads }) });
    part.against = el("select", { onchange: () => arrange({ against: part.against.value === "" ? null : { model: Number(part.against.value), ...(part.against.value === "0" && { prompt: (state.prompt + 1) % model.prompts.length }) } }) });
    part.own = el("textarea", { rows: 3, spellcheck: false, "aria-label": "Your own text" });
    part.read = button("Read this text", () => restart({ text: part.own.value }));
    part.find = el("input", { type: "search", size: 14, className: "find", onkeydown: (event) => { if (event.key === "Enter") find(event.shiftKey); } });
    part.found = el("output", { className: "found", "aria-live": "polite" });
    part.token = el("input", { type: "number", min: 0, step: 1, className: "token-number", onchange: () => { if (part.token.value !== "") reveal(Number(part.token.value)); } });
    part.spans = el("div", { className: "spans", role: "group", "aria-label": "Jump to a span" });
    part.sink = el("input", { type: "checkbox", className: "sink", title: "Many heads rest on token 0; without it the other tokens share what is left of 100 %", onchange: () => arrange({ sink: part.sink.checked }) });
    part.range = el("select", { className: "range", onchange: () => arrange({ range: part.range.value }) }, ...Object.entries(RANGES).map(([name, says]) => option(name, says)));
    part.add = button("Add a head", more);
    part.strip = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [name, value] of Object.entries({ class: "overview", preserveAspectRatio: "none", role: "img", "aria-label": "The whole prompt; drag the frame to move the view" })) part.strip.setAttribute(name, value);
    part.seen = el("p", { className: "hint" });
    part.looking = el("p", { className: "looking", "aria-live": "polite", hidden: true });
    part.looks = el("p", { className: "said looks", "aria-live": "polite" });
    part.heads = el("div", {});
    part.table = el("details", { hidden: true });
    part.where = el("select", { onchange: drawField });
    part.which = el("select");
    part.kind = el("select", { onchange: drawField });
    part.value = el("input", { type: "number", step: "any" });
    part.valued = el("label", {}, el("span"), " ", part.value);
    part.edits = el("ol", { className: "edits" });
    part.edit = button("Add edit", add);
    part.undo = button("Undo", undo, { title: "Ctrl+Z" });
    part.redo = button("Redo", redo, { title: "Ctrl+Y" });
    part.suggestions = el("div", { className: "suggestions", "aria-live": "polite" });
    part.suggest = button("Which positions does the answer need?", suggest);
    part.heat = el("select", { onchange: () => update({ heat: part.heat.value }) }, option("clean", "without the edits"), option("changed", "with the edits"), option("difference", "difference"));
    part.text = el("div", { className: "text", tabIndex: 0, role: "group", "aria-label": "The prompt; arrow keys choose a token, with Shift they select", lang: "", dir: "auto", onkeydown: keys });
    part.said = el("p", { className: "said", "aria-live": "polite" });
    part.mass = el("div", { className: "scroll" });
    part.next = el("div", { className: "scroll" });
    part.answered = el("p", { className: "said", "aria-live": "polite" });
    part.going = el("span", { className: "hint", "aria-live": "polite" }); // beside the buttons, so that no chart moves
    part.clean = el("p", { className: "continued", lang: "", dir: "auto" });
    part.changed = el("p", { className: "continued", lang: "", dir: "auto" });
    part.goes = el("input", { type: "checkbox", checked: true });
    part.told = el("output", { className: "hint", "aria-live": "polite" });
    part.how = el("p", { className: "hint", textContent: source.how || "", hidden: !source.how });
    part.texts = el("details", {}, el("summary", { textContent: "Your own text" }), part.own, part.read);
    part.python = el("pre", { tabIndex: 0, hidden: true });
    root.replaceChildren(
      el("header", {}, part.title, part.banner, part.refused, el("div", { className: "controls" },
        field("Prompt", part.prompts), (part.compared = field("Compare with", part.against)), live(button("Copy as Python", python)), button("CSV", () => file("csv")), live(button("netCDF", () => file("netcdf"))), tour(root, Boolean(source.how)), live(part.texts), part.told, part.busy), part.python),
      el("div", { className: "columns" },
        el("div", {},
          section("Heads", part.looking, part.heads, el("div", { className: "controls" }, part.add), part.table),
          section("Edits", part.how, part.suggestions, live(el("div", { className: "controls" }, part.suggest)),
            live(el("div", { className: "controls" }, field("Give", part.where), field("for", part.which), field("", part.kind), part.valued, part.edit, part.undo, part.redo)), part.edits),
          section("Answer", part.answered, el("div", { className: "controls" }, button("The selected tokens are the answer", () => update({ answer: range(state.selection) })), button("The prompt's answer", () => update({ answer: [] }))), plot("answer"), saved("answer")),
          section("Next tokens", part.next)),
        el("div", {},
          section("Prompt", el("div", { className: "controls" }, field("Find", part.find), field("Token", part.token), live(field("Shade by attention", part.heat)), field("Leave token 0 out", part.sink), part.found), part.spans, part.text, part.said, part.looks, part.mass),
          section("Continuation", el("div", { className: "controls" }, button("Continue", go), button("Stop", () => stop && stop.abort()), el("label", {}, part.goes, " after every change"), part.going), part.clean, part.changed),
          section("Positions", el("div", { className: "controls" }, field("Vertical range", part.range), button("Whole prompt", () => arrange({ view: null }))),
            el("p", { className: "hint", textContent: (source.how ? "Click a point to choose its token, drag to zoom. " : "Drag a point to give its token another position. ") + "With the chart focused: ← → choose the token" + (source.how ? "." : ", ↑ ↓ move it.") }), part.strip, plot("positions", { tabIndex: 0, role: "application", "aria-label": "Positions of the chosen heads", onkeydown: keys }), part.seen, saved("positions")),
          (part.ordered = section("Order by distance", el("p", { className: "hint", textContent: "Each row: heads with positions of their own. Red: the later of two tokens has the higher position, blue: the lower one, white: no order. A click shows the head." }), plot("orders"), saved("orders"))),
          section("Attention of the chosen token", plot("attention"), saved("attention")),
          section("Logits by distance", plot("logits"), saved("logits")))));
    for (const name of source.how ? ["Answer", "Continuation"] : []) root.querySelector('section[aria-label="' + name + '"]').hidden = true;
    if (!source.how) draggable(part.positions, () => view && view.numbers, move);
    const moved = (event) => {
      const place = part.strip.getBoundingClientRect(), token = ((event.clientX - place.left) / place.width) * prompt.tokens.length;
      const half = state.view ? (state.view[1] - state.view[0]) / 2 : AROUND;
      arrange({ view: [token - half, token + half] });
    };
    part.strip.addEventListener("pointerdown", (event) => { part.strip.setPointerCapture(event.pointerId); moved(event); });
    part.strip.addEventListener("pointermove", (event) => { if (event.buttons) moved(event); });
  }

  // ---- the state and its requests -------------------------------------------------------------------------------------

  function message(ask, further = {}) {
    const { prompt, text, heads, token, selection, looking, answer, edits } = state;
    return { ask, prompt, text, heads, token: token ?? 0, selection, looking, answer, edits, ...further };
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
    const before = state, mine = ++turn, of = begun;
    if (changes.edits && keep && !same(changes.edits, state.edits)) {
      past.push(state.edits);
      future = [];
    }
    state = { ...state, ...changes };
    const on = state.edits.some((edit) => edit.on !== false);
    if (!on) state.heat = "clean";
    else if (!before.edits.some((edit) => edit.on !== false) && state.heat === "clean") state.heat = "difference";
    if (opening) return null; // the prompt that is opened is then looked at with these changes
    const answer = await answered("view");
    if (mine !== turn || of !== begun) return answer && null; // what was asked since has them too
    if (answer === false) revert(Object.keys(changes).length ? before : shown);
    if (!answer) return answer;
    view = answer;
    if (state.view && !holds([state.view], state.token)) {
      const half = (state.view[1] - state.view[0]) / 2;
      state.view = [state.token - half, state.token + half];
    }
    shown = state;
    drawAll();
    if (changes.edits && part.goes.checked && prompt.start) go();
    return answer;
  }

  // Change what is drawn of the same answers; a change that waits for its answer is drawn with that.
  function arrange(changes, draw = drawAll) {
    state = { ...state, ...changes };
    shown = { ...shown, ...changes };
    if (!view) return;
    const asked = state;
    state = shown;
    try {
      draw();
      kept();
    } finally {
      state = asked;
    }
  }

  function kept() {
    if (addressed) history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(Object.fromEntries(Object.entries(state).filter(([name, value]) => !same(value, EMPTY[name]))))));
    if (compare) compare(state.against);
    events.dispatchEvent(new Event("drawn"));
    const now = chosen();
    if (same(now, told)) return;
    told = now;
    events.dispatchEvent(new Event("chosen"));
  }

  // What others may follow; a prompt is named by its number in the run.
  function chosen() {
    const { heads, text, token, view } = state;
    return { layer: heads[0][0], head: heads[0][1], heads, prompt: model.numbers ? model.numbers[state.prompt] : state.prompt, text, token, count: prompt.tokens.length, view };
  }

  // Show what is chosen elsewhere, as far as this source has it.
  async function follow(wanted) {
    const heads = wanted.heads || (wanted.layer === undefined ? state.heads : [[wanted.layer, wanted.head]]);
    const known = heads.filter(([layer, head]) => model.layers.some((one) => one.layer === layer && model.heads.slice(0, one.heads).includes(head)));
    const place = wanted.prompt === undefined ? state.prompt : model.numbers ? model.numbers.indexOf(wanted.prompt) : wanted.prompt, { text = state.text } = wanted;
    if (text !== state.text || (text === null && place !== state.prompt && place in model.prompts)) await restart({ prompt: Math.max(place, 0), text, heads: state.heads });
    const changes = {};
    if (known.length && !same(known, state.heads)) changes.heads = known;
    if (wanted.token !== undefined && wanted.token !== state.token) changes.token = Math.min(wanted.token, prompt.tokens.length - 1);
    if (wanted.view !== undefined && !same(wanted.view, state.view)) changes.view = wanted.view;
    if (Object.keys(changes).length) await update(changes);
  }

  // Take a refused change back, and ask for what was changed before it and is not shown yet.
  function revert(before) {
    state = before;
    if (past.length && same(past[past.length - 1], before.edits)) past.pop();
    if (!prompt || !view) return;
    if (same(before, shown)) drawAll();
    else update({});
  }

  async function restart(changes) {
    const { range, sink, against } = state;
    const wanted = { ...EMPTY, ...Object.fromEntries(Object.keys(MAP).map((name) => [name, state[name]])), range, sink, against, ...changes };
    const mine = ++begun;
    state = wanted;
    opening += 1;
    const answer = await answered("prompt").finally(() => (opening -= 1));
    if (mine !== begun) return answer && null;
    if (answer === false) state = shown;
    if (!answer) return answer;
    prompt = answer;
    view = null;
    const sound = (tokens) => tokens.every((token) => Number.isInteger(token) && token >= 0 && token < prompt.tokens.length);
    state.heads = state.heads.length ? state.heads : prompt.shown || [prompt.head];
    state.token = state.token !== null && sound([state.token]) ? state.token : prompt.token;
    if (state.selection && !sound(state.selection)) state.selection = null;
    if (state.selection === null && state.view && !(state.view[0] < state.view[1])) state.view = null;
    if (!["token", "answer"].includes(state.looking) || !prompt.answer.length) state.looking = "token";
    if (!(state.score === LOOKING && state.selection) && !mapsOf(prompt.heads).some((map) => map.title === state.score)) state.score = prompt.score;
    shown = state;
    past = [];
    future = [];
    // The token index, the first kind, changes nothing where all positions are that already
    if (!part.kind.selectedIndex && prompt.heads.by_index && prompt.heads.by_index.flat().every(Boolean)) part.kind.value = "linear";
    part.suggestions.replaceChildren();
    part.going.textContent = "";
    part.clean.replaceChildren();
    part.changed.replaceChildren();
    drawPrompt();
    const seen = await update({});
    if (!seen) return seen;
    const heads = model.layers.reduce((sum, layer) => sum + layer.heads, 0);
    if (part.goes.checked && !source.how) go();
    if (!state.edits.length && model.layers.some(({ refused }) => refused && !refused.ranked) && heads * prompt.tokens.length <= QUICK) suggest();
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

  // ---- edits ----------------------------------------------------------------------------------------------------------

  // The heads or the layer of the form, and the layers of an edit.
  function edited() {
    const [where, name] = part.where.value.split(/:(.*)/s);
    return where === "layer" ? { layer: Number(name) } : { heads: where === "group" ? groupOf(name) : state.heads };
  }

  const layersOf = ({ layer, heads }) => model.layers.filter((one) => (heads ? heads.some(([at]) => at === one.layer) : one.layer === layer));

  function drawKinds() {
    const positions = Object.entries(model.edits || {}).map(([kind, row]) => [kind, { ...row, read: row.field === "starts" ? numbersOf : Number }]);
    const form = { Positions: Object.fromEntries(positions), ...FORM }, chosen = part.kind.value;
    kinds = Object.assign({}, ...Object.values(form));
    part.kind.replaceChildren(...Object.entries(form).map(([label, rows]) => el("optgroup", { label }, ...Object.entries(rows).map(([kind, { says }]) => option(kind, says)))));
    if (chosen in kinds) part.kind.value = chosen;
    drawField();
  }

  function drawField() {
    const { field: name, label = "", hint = "", read, as = "ranked" } = kinds[part.kind.value];
    part.valued.hidden = !name;
    part.valued.firstChild.textContent = label;
    Object.assign(part.value, { type: read === numbersOf ? "text" : "number", placeholder: hint });
    const ofTokens = as === "ranked", reason = layersOf(edited()).map(({ refused = {} }) => refused[as]).find(Boolean) || "";
    Object.assign(part.which, ofTokens ? { disabled: false, title: "" } : { disabled: true, value: "", title: "Frequencies and outputs change for all tokens" });
    Object.assign(part.edit, { disabled: Boolean(reason), title: reason });
  }

  function drawForm() {
    const groups = model.head_table ? [...new Set(model.head_table.rows.flatMap(namesOf))].sort() : [];
    const layers = model.layers.map(({ layer }) => option("layer:" + layer, "layer " + layer));
    const chosen = part.where.value, tokens = part.which.value;
    part.where.replaceChildren(option("shown", state.heads.map(nameOf).join(", ")), ...layers, ...groups.map((name) => option("group:" + name, "heads named " + name)));
    part.which.replaceChildren(option("", "all tokens"), option("token", "token " + state.token), ...(state.selection ? [option("selection", "tokens " + state.selection.join("–"))] : []), ...Object.keys(prompt.spans).map((name) => option("span:" + name, "span " + name)));
    for (const [select, value] of [[part.where, chosen], [part.which, tokens]]) if ([...select.options].some((one) => one.value === value)) select.value = value;
    drawField();
  }

  function add() {
    const { kind = part.kind.value, field: parameter, read = Number } = kinds[part.kind.value], edit = { kind, ...edited() };
    const [which, span] = part.which.value.split(/:(.*)/s);
    if (which === "token") edit.tokens = [state.token];
    if (which === "selection") edit.tokens = range(state.selection);
    if (which === "span") edit.span = span;
    if (parameter && part.value.value !== "") edit[parameter] = read(part.value.value, layersOf(edit)[0].pairs);
    update({ edits: [...state.edits, edit] });
  }

  // The names of a head in the table of heads, and its kind.
  const namesOf = (row) => ["name", "kind"].flatMap((column) => String(row[model.head_table.columns.indexOf(column)] || "").split(", ")).filter((name) => name);

  function groupOf(name) {
    const { columns, rows } = model.head_table, at = (column) => columns.indexOf(column);
    return rows.filter((row) => namesOf(row).includes(name)).map((row) => [row[at("layer")], row[at("head")]]);
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
    for (const [control, kept, key, none] of [[part.undo, past, "Ctrl+Z", "No edit to undo"], [part.redo, future, "Ctrl+Y", "No undone edit"]]) Object.assign(control, { disabled: !kept.length, title: kept.length ? key : none });
  }

  async function suggest() {
    part.suggest.disabled = true;
    const mine = prompt, ended = new AbortController(), looking = el("span", { textContent: "looking for the positions that the answer needs …" });
    part.suggestions.replaceChildren(el("p", { className: "hint" }, looking, " ", button("Stop", () => { ended.abort(); part.suggestions.replaceChildren(); }, { className: "small" })));
    const take = ({ suggested, done, total }) => {
      if (mine !== prompt) ended.abort();
      if (ended.signal.aborted) return;
      if (!suggested) {
        looking.textContent = "looking for the positions that the answer needs: " + Math.floor((100 * done) / total) + " %";
        return;
      }
      const costs = (effect) => (Math.abs(effect) < LEAST_NATS ? "changes less than " + LEAST_NATS : (effect > 0 ? "gains " : "costs ") + number(Math.abs(effect), 3)) + " nats per token";
      const offer = ({ edit, sentence, effect, moves }) => button(sentence.replace(/^(.*): the token index$/, "give $1 the token index").replace(/^(.*): the mean position$/, "give $1 their mean position") + ": " + costs(effect), () => update({ edits: [...state.edits, edit], ...moves }), { className: "suggested" });
      const whole = suggested.filter(({ edit }) => edit.named), others = suggested.filter(({ edit, effect }) => !edit.named && effect <= -LEAST_NATS);
      part.suggestions.replaceChildren(
        el("p", { className: "hint", textContent: others.length ? "Try one: the edits of one layer or head that cost the answer most." : "No single head or layer is needed for this answer." }), ...others.map(offer),
        ...(whole.length ? [el("p", { className: "hint", textContent: "All heads of one kind, as this prompt shows kinds:" }), ...whole.map(offer)] : []));
    };
    try {
      await source.events(message("suggest"), take, ended.signal);
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
    part.going.textContent = "generating …";
    const take = (event) => {
      if (mine.signal.aborted) return;
      part.going.textContent = "";
      const kind = event.right === null ? "" : event.right ? "right" : "wrong";
      lines[event.state].append(el("span", { textContent: readable(event.text), className: kind, title: kind && kind + ", by the answer of the prompt" }), prompt.joint);
    };
    try {
      await source.events(message("continue"), take, mine.signal);
      if (mine === stop && part.going.textContent) part.going.textContent = mine.signal.aborted ? "" : "The model ends the text here.";
    } catch (error) {
      part.going.textContent = "";
      if (!error.refused) throw error;
      part.changed.append(el("span", { className: "refused", textContent: error.message }));
    }
  }

  // ---- what is drawn --------------------------------------------------------------------------------------------------

  // Maps of heads as `headMap` draws them; a session gives its scores by name.
  const mapsOf = ({ maps, scores }) => maps || Object.entries(scores).map(([title, map]) => ({ ...map, title, mean: "this prompt" + (view && view.heads ? ", under the edits" : ""), layers: model.layers, heads: model.heads }));

  function drawMap() {
    const heads = (view && view.heads) || prompt.heads, looking = view && state.selection ? lookingMap(view.looking, model) : null;
    part.map({ ...heads, maps: [...(looking ? [looking] : []), ...mapsOf(heads)] }, state, state.heads, HEADS);
    part.line(state, prompt, view, looking);
    part.add.disabled = state.heads.length >= MOST_SHOWN || !next();
    part.add.title = !part.add.disabled ? "" : state.heads.length >= MOST_SHOWN ? "At most " + MOST_SHOWN + " heads are shown" : "All heads are shown";
    if (part.rows) part.rows(state.heads);
    part.ordered.hidden = !heads.orders;
    if (heads.orders) orders(part.orders, heads.orders, state.heads, (pair) => choose(pair));
  }

  // Select tokens, or none, and color the heads by their attention to them; where the chosen token stands before them, by the answer's.
  function select(selection, changes = {}) {
    const token = changes.token ?? state.token, answer = state.answer.length ? state.answer : prompt.answer;
    const looking = selection && token < selection[0] && answer[answer.length - 1] > selection[0] ? "answer" : state.looking;
    return update({ ...changes, selection, looking, score: selection ? LOOKING : state.score === LOOKING ? prompt.score : state.score });
  }

  // The best-ranked head that is not shown.
  const next = () => [...(model.ranked || []), ...model.layers.flatMap((layer) => model.heads.slice(0, layer.heads).map((head) => [layer.layer, head]))].find((pair) => !state.heads.some((one) => same(one, pair)));
  const more = () => choose(next(), true);

  function choose(pair, more) {
    const shown = state.heads.some((one) => same(one, pair));
    const left = state.heads.filter((one) => !same(one, pair));
    return update({ heads: !more ? [pair] : shown && left.length ? left : shown ? state.heads : [...state.heads, pair].slice(-MOST_SHOWN) });
  }

  function drawTable() {
    part.table.hidden = !model.head_table;
    if (!model.head_table) return;
    const { columns, rows } = model.head_table, at = (name) => rows.map((row) => row[columns.indexOf(name)]);
    const place = el("div"), schemes = at("layer").map((layer) => model.layers.find((one) => one.layer === layer).name);
    const described = columns.slice(2).map((name) => ({ name, title: name, text: at(name).some((cell) => typeof cell === "string"), values: at(name) }));
    part.rows = headTable(place, { heads: rows.map(([layer, head]) => [layer, head]), schemes, columns: described, open: choose });
    part.table.replaceChildren(el("summary", { textContent: "Heads of the run" }), place);
  }

  function drawPrompt() {
    part.prompts.replaceChildren(...model.prompts.map((count, place) => option(place, (model.numbers ? model.numbers[place] : place) + " (" + count + " tokens)")), ...(state.text === null ? [] : [option("", "your own text")]));
    part.prompts.value = state.text === null ? state.prompt : "";
    part.own.value = state.text ?? part.own.value;
    part.token.max = prompt.tokens.length - 1;
    part.found.textContent = "";
    part.tokens = null;
    const jump = ([name, { at, colour }]) => {
      const element = button(name + (at.length > 1 ? " × " + at.length : ""), () => reveal(...(at.find(([first]) => first > state.token) || at[0])), { title: "jump to " + name + (at.length > 1 ? ", the next of " + at.length + " stretches" : ", tokens " + at[0].join("–")) });
      element.style.setProperty("--span", colour);
      return element;
    };
    const shaded = shadedSpans(prompt.spans).filter((name) => prompt.spans[name].at.length);
    part.spans.replaceChildren(...(shaded.length ? ["Jump to ", ...shaded.map((name) => jump([name, prompt.spans[name]]))] : []));
  }

  // The tokens around the chosen one, as many as stand in the page at a time.
  function drawTokens() {
    const count = prompt.tokens.length, at = state.token, held = part.tokens && [...part.tokens.keys()];
    const first = held ? held[0] : 0, last = held ? held[held.length - 1] : 0;
    if (held && (first === 0 || at >= first + 50) && (last === count - 1 || at <= last - 50)) return;
    const from = Math.max(0, Math.min(at - MOST_TEXT / 2, count - MOST_TEXT)), end = Math.min(count, from + MOST_TEXT);
    part.tokens = new Map();
    const nodes = [];
    for (let token = from; token < end; token++) {
      const text = prompt.tokens[token], node = el("span", { textContent: readable(text) }), spans = spansOf(token);
      node.dataset.token = token;
      node.title = "token " + token + (spans.length ? ", " + spans.join(", ") : "");
      if (spans.length) node.style.setProperty("--span", prompt.spans[spans[spans.length - 1]].colour);
      part.tokens.set(token, node);
      nodes.push(...(token > from && prompt.joint ? [" ", node] : text.includes("\n") ? [node, el("br")] : [node]));
    }
    part.text.replaceChildren(from ? "… " : "", ...nodes, end < count ? " …" : "");
  }

  const spansOf = (token) => Object.keys(prompt.spans).filter((name) => name !== "rest" && holds(prompt.spans[name].at, token));

  // Attention by state, as it is shown: where the reader leaves out token 0, the others get what is left of 1 without its share.
  function weights() {
    const rows = { ...byState(view.numbers.weight) }, rest = (values) => values.map((value, key) => (value === null || key === 0 ? null : value / (1 - values[0])));
    const given = (values, shown) => (state.sink && state.token > 0 && values[0] !== null && values.length && !(view.sizes && view.sizes[shown] > 1) ? rest(values) : values);
    for (const which of Object.keys(rows)) rows[which] = rows[which].map(given);
    if (view.numbers.weight_difference) rows.difference = view.numbers.weight_difference.values.map((values) => values.map((value, key) => (state.sink && key === 0 ? null : value)));
    return rows;
  }

  // Where the first of the shown heads looks, in words.
  function drawLooks(values) {
    const size = view.sizes ? view.sizes[0] : 1, blocks = new Map();
    values.forEach((value, key) => {
      const block = Math.floor(key / size), one = blocks.get(block) || { first: key, share: 0 };
      if (value) blocks.set(block, { ...one, last: key, share: one.share + value });
    });
    const best = [...blocks.values()].sort((one, other) => other.share - one.share).slice(0, 6).filter(({ share }, place) => place === 0 || Math.abs(share) >= LEAST_SHARE), end = Math.min(prompt.tokens.length, size * (Math.floor(state.token / size) + 1)) - 1;
    const words = ({ first, last }) => (prompt.texts === false ? "" : " “" + prompt.tokens.slice(first, Math.min(last, first + 3) + 1).map(visible).join(prompt.joint) + (last > first + 3 ? "…" : "") + "”");
    const said = best.map((one) => (one.first === one.last ? one.first : one.first + "–" + one.last) + words(one) + " " + Number((100 * one.share).toFixed(1)) + " %").concat(blocks.size > best.length && !best.some(({ share }) => Math.abs(share) < LEAST_SHARE) && best.length < 6 ? ["each other one less than " + 100 * LEAST_SHARE + " %"] : []);
    const from = size > 1 ? "tokens " + size * Math.floor(state.token / size) + "–" + end : "token " + state.token;
    const known = values.filter((value) => value !== null), held = known.reduce((sum, value) => sum + value, 0);
    const estimate = size > 1 ? "; estimated from mean logits of blocks of " + size + " × " + size + " pairs" : view.kept && held < 0.999 ? "; " + view.kept + ", " + known.length + " of them, hold " + number(100 * held, 3) + " %" : "";
    part.looks.textContent = said.length ? nameOf(state.heads[0]) + " looks from " + from + (state.sink && size === 1 && state.token > 0 ? " without token 0" : "") + " at tokens " + said.join(", ") + estimate + "." : (view.missing || "") + " ";
    if (!said.length && view.near !== null && view.near !== undefined) part.looks.append(button("Choose token " + view.near, () => update({ token: view.near })));
  }

  // Whether the prompt or the reader marks tokens as the answer.
  const hasAnswer = () => state.answer.length > 0 || Boolean(prompt.spans.generated);

  function drawText() {
    drawTokens();
    const rows = weights(), values = (rows[state.heat] || rows.clean)[0], most = values.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
    part.heat.value = state.heat in rows ? state.heat : "clean";
    if (part.heat.parentElement) part.heat.parentElement.hidden = !rows.changed; // there is nothing to choose yet
    part.token.value = state.token;
    part.sink.checked = state.sink;
    const answer = new Set(state.answer.length ? state.answer : prompt.answer);
    part.suggest.textContent = "Which positions does " + (hasAnswer() ? "the answer" : "the last token") + " need?";
    for (const [token, node] of part.tokens) {
      const weight = values[token] || 0;
      node.style.setProperty("--heat", (80 * Math.sqrt(Math.abs(weight) / most)).toFixed(1) + "%");
      node.classList.toggle("less", weight < 0);
      node.classList.toggle("chosen", token === state.token);
      node.classList.toggle("selected", Boolean(state.selection) && holds([state.selection], token));
      node.classList.toggle("answer", answer.has(token));
    }
    const at = part.tokens.get(state.token).offsetTop - part.text.scrollTop;
    if (at < 0 || at > part.text.clientHeight - 24) part.text.scrollTop += at - part.text.clientHeight / 2;
    const places = Object.values(byState(view.numbers.position)).pop().map((values) => values[state.token]);
    part.said.textContent = "Token " + state.token + (prompt.texts === false ? "" : " (" + visible(prompt.tokens[state.token]) + ")") + (Object.keys(prompt.spans).some((name) => name !== "rest") ? " in " + (spansOf(state.token).join(", ") || "no span") : "") + (model.bare ? "" : "; position " + places.map((value, shown) => number(value, 4) + " (" + nameOf(state.heads[shown]) + ")").join(", ")) + ". " + (hasAnswer() ? "Bold: the answer. " : "") + "Click a token; drag over tokens to see which heads look at them.";
    drawLooks(rows.changed ? rows.changed[0] : rows.clean[0]);
    // All attention goes to the rest where the prompt has no spans
    part.mass.hidden = !view.numbers.span_mass || view.numbers.span.values.every((name) => name === "rest");
    if (part.mass.hidden) return;
    const spans = view.numbers.span.values, mass = byState(view.numbers.span_mass);
    const states = Object.keys(mass);
    const meet = (one, other) => one && other && one.at.some(([first, last]) => other.at.some(([from, to]) => first <= to && from <= last));
    const ofRow = spans.some((name) => name === "needle" && !prompt.spans[name]); // a needle of each token of the answer
    const twice = spans.filter((name, place) => prompt.spans[name] && spans.slice(0, place).some((other) => meet(prompt.spans[name], prompt.spans[other])));
    part.mass.replaceChildren(el("table", {}, el("caption", { textContent: "Attention to spans (%)" + (twice.length ? "; tokens of " + twice.join(" and ") + " are in other spans too" : "") + (ofRow ? "; needle: the token that is copied next, query: the one said last" : "") }), el("thead", {}, el("tr", {}, el("th", { textContent: "head" }), ...spans.map((name) => el("th", { textContent: name })))),
      el("tbody", {}, ...state.heads.flatMap((pair, shown) => states.map((which) => el("tr", {}, el("th", { scope: "row", textContent: nameOf(pair) + (which === "changed" ? ", changed" : "") }), ...mass[which][shown].map((value) => el("td", { className: "number", textContent: percent(value) }))))))));
  }

  function drawNext() {
    if (!view.numbers.probability) {
      part.next.replaceChildren(el("p", { className: "hint", textContent: view.unexpected }));
      return;
    }
    const { instead } = view, place = instead ? model.numbers.indexOf(instead.prompt) : state.prompt, token = instead ? instead.token : state.token;
    const texts = view.numbers.next_text ? byState(view.numbers.next_text) : byState(view.numbers.next_token), shares = byState(view.numbers.probability);
    const states = Object.keys(texts), quoted = (at) => (prompt.texts === false || place !== state.prompt ? "" : " “" + visible(prompt.tokens[at]) + "”");
    const columns = states.flatMap((which) => [states.length < 2 ? "next token" : which === "clean" ? "as it is" : "changed", "%"]);
    const rows = texts.clean.map((_, rank) => el("tr", {}, ...states.flatMap((which) => [el("td", { className: "token", textContent: visible(String(texts[which][rank])) }), el("td", { className: "number", textContent: percent(shares[which][rank]) })])));
    const follows = view.following === undefined ? "" : view.following === null ? "; the prompt ends here" : "; the prompt goes on with" + (quoted(token + 1) || " a token") + ", which has " + percent(view.following) + " %";
    const caption = (instead && place !== state.prompt ? "Prompt " + instead.prompt + ", after" : "After") + " token " + token + quoted(token) + follows;
    const why = instead && (place === state.prompt ? "Of token " + state.token + " none are kept; the nearest is token " + token + ". " : "A run keeps next tokens of prompt " + instead.prompt + " alone. ");
    const show = button(place === state.prompt ? "Choose token " + token : "Show prompt " + (instead && instead.prompt), () => follow(instead));
    part.next.replaceChildren(...(instead ? [el("p", { className: "hint", textContent: why }, place >= 0 ? show : null)] : []), el("table", {}, el("caption", { textContent: caption }), el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { textContent: name, className: name === "%" ? "number" : "" })))), el("tbody", {}, ...rows)));
  }

  function drawAnswer() {
    const values = view.numbers.log_probability.values, scores = view.numbers.score.values;
    const both = (given) => (Array.isArray(given) ? given.map((one) => number(one)).join(" → ") : number(given));
    const marked = state.answer.length || prompt.answer.length;
    part.answered.textContent = (hasAnswer() ? (marked === 1 ? "1 token" : marked + " tokens") + ", bold in the prompt" : "The prompt marks no answer, so its last token stands for one") + ": log-probability " + both(values) + " nat, score " + both(scores);
    for (const one of [part.answer, part.answer.nextElementSibling]) one.hidden = !view.numbers.curve; // a single point says what the line does
    if (view.numbers.curve) curve(part.answer, view.numbers, state.edits.map((edit, place) => view.sentences[place]).filter((_, place) => state.edits[place].on !== false));
  }

  function drawPositions() {
    if (model.bare) return;
    const { numbers } = view, rows = Object.values(byState(numbers.position)).pop();
    part.range.value = state.range;
    positions(part.positions, view, state, prompt);
    if (prompt.tokens.length > 2 * AROUND) overview(part.strip, rows[0], state, prompt);
    else part.strip.setAttribute("hidden", "");
    part.seen.textContent = rows.map((values, shown) => [nameOf(state.heads[shown]), seen(values, view.ranges && view.ranges[shown], state, prompt)]).filter(([, said]) => said).map((said) => said.join(": ")).join(". ");
    if (part.positions.heard) return;
    part.positions.heard = true;
    part.positions.on("plotly_click", (event) => update({ token: Math.round(event.points[0].x) }));
    part.positions.on("plotly_doubleclick", () => arrange({ view: null }));
    part.positions.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) setTimeout(() => arrange({ view: [change["xaxis.range[0]"], change["xaxis.range[1]"]] }));
    });
  }

  function drawAll() {
    drawMap();
    part.against.value = state.against ? state.against.model : "";
    if (!source.how) {
      drawForm();
      drawAnswer();
    }
    drawEdits();
    drawText();
    drawNext();
    drawPositions();
    const held = view.numbers.weight.values.flat().length > 0;
    for (const plot of [part.attention, part.logits]) plot.parentElement.hidden = !held;
    if (held) {
      attention(part.attention, weights(), state, prompt, view.sizes);
      distances(part.logits, view.numbers, state, Boolean(source.how), view.around);
    }
    kept();
  }

  // ---- finding --------------------------------------------------------------------------------------------------------

  // Choose a token and show what is around the tokens from it to `last`; short prompts stay whole.
  function reveal(token, last = token) {
    const first = Math.max(0, Math.min(prompt.tokens.length - 1, Math.round(token))), around = Math.max(AROUND, Math.round(0.3 * (last - first)));
    const inside = state.view && first >= state.view[0] && last <= state.view[1] && state.view[1] - state.view[0] <= 2 * around + last - first + 1;
    const zoomed = prompt.tokens.length <= 2 * AROUND || inside ? {} : { view: [Math.max(-1, first - around), Math.min(prompt.tokens.length, last + around)] };
    update({ token: first, selection: last > first ? [first, last] : state.selection, ...zoomed });
  }

  // The prompt as it is read, in lower case and with runs of white space as one space, and the token of every character.
  function readingText() {
    let text = "";
    const owner = [];
    prompt.tokens.forEach((own, token) => {
      for (const character of (token ? prompt.joint : "") + own.toLowerCase()) {
        const read = /\s/.test(character) ? " " : character;
        if (read === " " && text.endsWith(" ")) continue;
        text += read;
        for (let unit = 0; unit < read.length; unit++) owner.push(token);
      }
    });
    return { text, owner };
  }

  function find(backwards) {
    const wanted = part.find.value.toLowerCase().trim().replace(/\s+/g, " "), { text, owner } = readingText(), matches = [];
    if (!wanted || prompt.texts === false) {
      part.found.textContent = wanted ? "This run has no texts." : "";
      return;
    }
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) matches.push([owner[at], owner[at + wanted.length - 1]]);
    if (!matches.length) {
      part.found.textContent = "“" + part.find.value + "” is not in this prompt.";
      return;
    }
    const again = part.sought === wanted, [from] = again ? part.match : [state.token];
    let place = backwards ? matches.findLastIndex(([first]) => first < from) : matches.findIndex(([first]) => (again ? first > from : first >= from));
    if (place < 0) place = backwards ? matches.length - 1 : 0;
    part.sought = wanted;
    part.match = matches[place];
    part.found.textContent = place + 1 + " of " + matches.length + (matches.length > 1 ? " (Enter: next, Shift+Enter: previous)" : "");
    const [first, last] = part.match;
    state.selection = [first, last];
    reveal(first, last);
  }

  // ---- keys and pointers ----------------------------------------------------------------------------------------------

  function keys(event) {
    const last = prompt.tokens.length - 1, step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -16, PageDown: 16 }[event.key];
    const goal = event.key === "Home" ? 0 : event.key === "End" ? last : step === undefined ? null : Math.min(last, Math.max(0, state.token + step));
    const up = source.how ? undefined : { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (goal !== null && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      const anchor = event.shiftKey ? (state.anchor ?? state.token) : null;
      if (anchor === null) update({ token: goal, anchor: undefined });
      else select([Math.min(anchor, goal), Math.max(anchor, goal)], { token: goal, anchor });
    } else if (up && event.currentTarget === part.positions) {
      event.preventDefault();
      const rows = byState(view.numbers.position), value = (rows.changed || rows.clean)[0][state.token];
      if (value !== null) move(0, state.token, value + up * (event.shiftKey ? 0.1 : 1));
    } else if (event.key === "Escape") select(null);
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
      if (event.shiftKey) select([Math.min(state.token, last), Math.max(state.token, last)]);
      else if (first === last) update({ token: last });
      else select([Math.min(first, last), Math.max(first, last)]);
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
    const bytes = bytesOf(answer.base64);
    const link = el("a", { href: URL.createObjectURL(new Blob([bytes])), download: answer.name });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // ---- the whole ------------------------------------------------------------------------------------------------------

  // What the address says; null where it says no state, as a link to another place of the page.
  function ofAddress() {
    try {
      const given = JSON.parse(decodeURIComponent(location.hash.slice(1)));
      const lists = (name) => Array.isArray(EMPTY[name]) || (["selection", "view"].includes(name) && given[name] !== null);
      return Object.fromEntries(Object.keys(EMPTY).filter((name) => name in given && Array.isArray(given[name]) === lists(name)).map((name) => [name, given[name]]));
    } catch {
      return null;
    }
  }

  async function begin() {
    const opened = await answered("open");
    if (!opened) return;
    model = { heads: Array.from({ length: Math.max(...opened.layers.map((layer) => layer.heads)) }, (_, head) => head), ...opened };
    part.heads.replaceChildren();
    const ofMap = (changes) => arrange(changes, drawMap);
    part.line = lookingLine(part.looking, { from: (looking) => update({ looking, score: LOOKING }), open: (pair) => choose(pair), clear: () => select(null) });
    part.map = headMap(part.heads, { layers: model.layers, heads: model.heads, open: choose, changed: ofMap });
    root.querySelector('section[aria-label="Positions"]').hidden = Boolean(model.bare);
    part.title.textContent = source.how ? "" : "Explorer: " + (model.checkpoint || "a model");
    part.texts.hidden = !model.reads_text;
    part.compared.hidden = !compare;
    if (compare) part.against.replaceChildren(option("", "nothing"), ...model.models.map((name, place) => option(place, place ? name : "another prompt")));
    drawTable();
    drawKinds();
    const given = prompt ? state : (addressed && ofAddress()) || first;
    if (given.against && !(given.against.model in model.models)) given.against = null;
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
  if (addressed) window.addEventListener("hashchange", () => { const given = ofAddress(); if (given) restart(given); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => arrange({}));
  return { arrange, choose, chosen, follow, events, state: () => state, ready: begin() };
}
