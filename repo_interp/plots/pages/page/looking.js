// "Which head looks at this?": a map of heads by their attention to the selected tokens, and the heads that give them most.
//
//     looking    what a source answers, shares by layer and head: `clean`, `changed` under edits; `most` where keys of a row are not kept, so
//                that `clean` are lower bounds; `rows` and `of`: rows that are kept, and that are asked for
import { button, el, nameOf, number, option, readable, visible } from "./dom.js";
import { MISSING } from "./map.js";

export const LOOKING = "attention to the selection (%)";
const STRONGEST = 5; // heads that are named
const SCALE = ["#00224e", "#002a61", "#003171", "#1c396f", "#2d416d", "#3a486c", "#45506c", "#50576c", "#5b606e", "#656870", "#6e6f73", "#777777", "#817f78", "#8c8878", "#969077", "#a19975", "#ada272", "#b9ab6d", "#c4b468", "#d0be62", "#dcc859", "#e8d24f", "#f5dc41", "#fee838"]; // cividis, as other maps

const percents = (rows) => rows.map((row) => row.map((value) => (value === null ? null : 100 * value)));

// The map of what a source answers; null where it has none.
export function lookingMap(looking, { layers, heads }) {
  if (!looking || !looking.clean) return null;
  const values = percents(looking.changed || looking.clean), all = [...values, ...percents(looking.clean)].flat().filter((value) => value !== null);
  const end = Math.max(1e-9, ...all), shade = (value) => (value === null ? MISSING : SCALE[Math.round(((SCALE.length - 1) * value) / end)]);
  return {
    title: LOOKING, variable: "", values, most: looking.most ? percents(looking.most) : null, colours: values.map((row) => row.map(shade)), scale: SCALE, ends: [0, end],
    mean: looking.changed ? "under the edits" : "", layers, heads, prompts: null, texts: null, control: null,
  };
}

// The heads of `map` with the largest values, [layer, head] and value.
function strongest({ values, layers, heads }) {
  const all = layers.flatMap(({ layer }, row) => heads.map((head, column) => ({ pair: [layer, head], value: values[row][column] })));
  return all.filter(({ value }) => value > 0).sort((one, other) => other.value - one.value).slice(0, STRONGEST);
}

// Where rows lack keys: by how much shares may be larger, in words.
function bounds({ most, values }) {
  const more = most ? Math.max(0, ...most.flatMap((row, layer) => row.map((value, head) => (value === null ? 0 : value - values[layer][head])))) : 0;
  return more < 0.05 ? "" : " At least: keys that are not kept may add up to " + number(more, 2) + " percentage points.";
}

// A line in `place` about what is selected. `from(name)` changes whose attention it is, `open(pair)` shows a head, `clear()` ends the selection.
export function lookingLine(place, { from, open, clear }) {
  const select = el("select", { onchange: () => from(select.value) });
  return function draw(state, prompt, view, map) {
    place.hidden = !state.selection;
    if (!state.selection) return;
    const [first, last] = state.selection, words = prompt.texts === false ? "" : " “" + readable(prompt.tokens.slice(first, Math.min(last, first + 5) + 1).join(prompt.joint).trim()) + (last > first + 5 ? "…" : "") + "”";
    const { rows = 1, of = 1 } = view.looking || {}, said = "the answer" + (state.looking === "answer" && rows < of ? " (" + rows + " of its " + of + " rows are kept)" : "");
    select.replaceChildren(option("token", "token " + state.token + (prompt.texts === false ? "" : " “" + visible(prompt.tokens[state.token]) + "”")), ...(prompt.answer.length ? [option("answer", said)] : []));
    select.value = state.looking;
    const found = map ? strongest(map) : [], late = state.looking === "token" && state.token < first;
    const none = map ? (late ? " Token " + state.token + " stands before them and sees none of them: click a later one." : " No head looks at them.") : " " + ((view.looking && view.looking.missing) || "");
    place.replaceChildren(
      el("b", { textContent: "Which heads look at " + (first === last ? "token " + first : "tokens " + first + "–" + last) + words + "?" }), " From ", select, ": ",
      ...found.flatMap(({ pair, value }) => [button(nameOf(pair) + " " + number(value, 3) + " %", () => open(pair), { className: "small" }), " "]), found.length ? bounds(map) : none, " ", button("Clear", clear, { className: "small", title: "Esc" }));
  };
}
