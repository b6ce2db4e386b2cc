// The map of heads: one tile per head, coloured by a score and with the outline of its positions; sorted and filtered. A click chooses the
// head, Shift or the box "several" adds it to those that are shown; arrow keys move from tile to tile.
import { button, el, field, ink, nameOf, number, option, same } from "./dom.js";

const BINS = 60; // columns of an outline of a long prompt
export const MISSING = "#d9d9d9";
export const MAP = { score: "", of: "mean", order: "layers", scheme: "", from: null, to: null, least: null };

// How much heads differ in a map: of its scale, what lies between the 10th and the 90th percentile.
export function differing(map) {
  const values = map.values.flat().filter((value) => value !== null).sort((a, b) => a - b);
  return (values[Math.floor(0.9 * (values.length - 1))] - values[Math.floor(0.1 * (values.length - 1))]) / (map.ends[1] - map.ends[0]) || 0;
}

// `map` with means over prompts, or in their place the largest value of all prompts or that of the prompt of this number.
function ofPrompts(map, of, number) {
  if (!map || !map.prompts || of === "mean") return map;
  const place = map.prompts.numbers.indexOf(number), known = map.prompts.values;
  const values = map.layers.map((_, row) => map.heads.map((_, column) => {
    const own = known.map((prompt) => prompt[row][column]).filter((value) => value !== null);
    if (of === "chosen") return place < 0 ? null : known[place][row][column];
    return own.length ? Math.max(...own) : null;
  }));
  const finite = values.flat().filter((value) => value !== null), reach = Math.max(...finite.map(Math.abs), 0) || 1;
  const ends = finite.some((value) => value < 0) ? [-reach, reach] : [0, reach], last = map.scale.length - 1;
  const colours = values.map((row) => row.map((value) => (value === null ? MISSING : map.scale[Math.round((last * (value - ends[0])) / (ends[1] - ends[0]))])));
  return { ...map, values, colours, ends, mean: of === "chosen" ? "prompt " + number : "largest of " + known.length + " prompts" };
}

const parted = (text) => text.split(", "); // a head may have several names, the first of which it is colored by

// A legend of the texts that color a map, with how many heads have each.
function kindsOf(map) {
  const counts = new Map(), colours = new Map();
  let without = 0;
  map.texts.forEach((row, layer) => row.forEach((text, head) => {
    if (!text) { without += 1; return; }
    parted(text).forEach((part) => counts.set(part, (counts.get(part) || 0) + 1));
    colours.set(parted(text)[0], map.colours[layer][head]);
  }));
  const entry = (text, count, colour, title) => {
    const entry = el("span", { textContent: text + ": " + count, title });
    entry.style.setProperty("--kind", colour);
    return entry;
  };
  const named = [...colours].sort(([one], [other]) => counts.get(other) - counts.get(one)).map(([text, colour]) => entry(text, counts.get(text), colour, (map.meanings && map.meanings[text]) || ""));
  const several = map.texts.flat().filter((text) => text && parted(text).length > 1).length;
  const twice = several ? [el("span", { className: "twice", textContent: several + (several === 1 ? " has" : " have") + " two names or more" })] : [];
  return [...named, ...(without ? [entry("no name", without, MISSING, "")] : []), ...twice];
}

// What the texts of a map say of a head, for those that color some head.
function meant({ texts, meanings }) {
  const present = Object.entries(meanings || {}).filter(([text]) => texts.some((row) => row.some((own) => parted(own)[0] === text)));
  return present.map(([text, meaning]) => text[0].toUpperCase() + text.slice(1) + ": " + meaning + ". ").join("");
}

const COLUMNED = 12; // layers or heads from which tiles without outlines have no text, and columns a head above them

// The outline of `values` as an SVG path in a box of 100 x 40: every token, or the smallest and largest of each column.
function outlined(values) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return null;
  let low = Infinity, high = -Infinity;
  for (const value of known) { low = Math.min(low, value); high = Math.max(high, value); }
  const y = (value) => (high > low ? 37 - (34 * (value - low)) / (high - low) : 20).toFixed(1);
  const x = (place) => ((100 * (place + 0.5)) / values.length).toFixed(1);
  const points = [];
  const point = (place, value) => { if (value !== null) points.push(x(place) + " " + y(value)); };
  if (values.length <= 2 * BINS) values.forEach((value, place) => point(place, value));
  else for (let bin = 0; bin < BINS; bin++) {
    const from = Math.floor((bin * values.length) / BINS), part = values.slice(from, Math.floor(((bin + 1) * values.length) / BINS)).filter((value) => value !== null);
    if (!part.length) continue;
    const ends = [Math.min(...part), Math.max(...part)];
    if (part[0] > part[part.length - 1]) ends.reverse();
    for (const end of ends) point(from + part.length / 2 - 0.5, end);
  }
  return { line: "M" + points.join("L"), range: high - low };
}

// A map in `place` of `layers` [{layer, name, colour, heads}] and `heads` [number]. `open(pair, more)` is called for a click, `changed(settings)`
// for a control. The result draws: `maps` and the outlines of a prompt as `settings` say, with the heads `shown` marked by `colours`.
export function headMap(place, { layers, heads, open, changed }) {
  const part = {}, tiles = [];
  const choice = (name, ...entries) => (part[name] = el("select", { onchange: () => changed({ [name]: part[name].value }) }, ...entries.map(([value, text]) => option(value, text))));
  const limit = (name, step) => (part[name] = el("input", { type: "number", step, oninput: () => changed({ [name]: part[name].value === "" ? null : Number(part[name].value) }) }));
  const names = [...new Set(layers.map((layer) => layer.name))], numbers = layers.map((layer) => layer.layer);
  const scheme = field("Scheme", choice("scheme", ["", "all"], ...names.map((name) => [name, name])));
  const span = el("span", { className: "pair" }, field("Layers", limit("from", 1)), " ", field("to", limit("to", 1)));
  const of = field("Of", choice("of", ["mean", "the mean over prompts"], ["largest", "the largest of all prompts"], ["chosen", "the chosen prompt"]));
  part.scale = el("span", { className: "head-scale" }, el("span"), el("span", { className: "bar" }), el("span"));
  part.kinds = el("span", { className: "head-kinds" });
  part.counted = el("output", { "aria-live": "polite" });
  part.several = el("input", { type: "checkbox" });
  part.grid = el("div", { className: "map", role: "group", "aria-label": "Heads; Shift adds a head to those that are shown", onkeydown: keys });
  part.hint = el("p", { className: "hint" });
  scheme.hidden = names.length < 2;
  const order = field("Order", choice("order", ["layers", "by layer"], ["largest", "largest first"], ["smallest", "smallest first"]));
  const filters = el("details", {}, el("summary", { textContent: "Order and filters" }), el("div", { className: "controls" }, order, scheme, span, field("At least", limit("least", "any")), field("Show several heads", part.several), part.counted));
  const score = field("Color by", choice("score"));
  score.className = "score";
  place.append(el("div", { className: "controls" }, score, of, part.scale, part.kinds, filters), el("div", { className: "scroll" }, part.grid), part.hint);
  for (const name of ["from", "to"]) Object.assign(part[name], { min: Math.min(...numbers), max: Math.max(...numbers) });

  for (const layer of layers) for (const head of heads.filter((one) => layer.heads === undefined || heads.indexOf(one) < layer.heads)) {
    const pair = [layer.layer, head];
    const tile = button("", (event) => open(pair, event.shiftKey || part.several.checked), { className: "tile" });
    tile.dataset.head = pair.join(".");
    tile.innerHTML = '<span class="tile-name"></span><span class="tile-score"></span><svg viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true"></svg><span class="as"></span>';
    tiles.push({ tile, layer, head, pair, values: undefined, outline: null, without: "" });
  }

  // Scrolls the map, not the page, to a tile that is not seen.
  function intoView(tile) {
    const frame = part.grid.parentElement, own = tile.getBoundingClientRect(), seen = frame.getBoundingClientRect();
    if (own.top < seen.top || own.bottom > seen.bottom) frame.scrollTop += own.top - seen.top - seen.height / 2;
  }

  // Arrow keys move to the nearest tile in that direction.
  function keys(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in steps) || !document.activeElement.classList.contains("tile")) return;
    event.preventDefault();
    const [right, down] = steps[event.key], from = document.activeElement, own = from.getBoundingClientRect();
    let best = null, least = Infinity;
    for (const tile of part.grid.querySelectorAll(".tile")) {
      const other = tile.getBoundingClientRect(), x = other.left - own.left, y = other.top - own.top;
      if (x * right + y * down <= 1) continue;
      const far = right ? Math.abs(x) + 100 * Math.abs(y) : Math.abs(y) + 0.01 * Math.abs(x);
      if (far < least) { least = far; best = tile; }
    }
    if (!best) return;
    from.tabIndex = -1;
    best.tabIndex = 0;
    best.focus();
  }

  function drawTile(one, map, outlines, mean) {
    const row = map ? map.layers.findIndex((layer) => layer.layer === one.layer.layer) : -1, column = map ? map.heads.indexOf(one.head) : -1;
    const known = row >= 0 && column >= 0;
    one.value = known ? map.values[row][column] : null;
    if (outlines) {
      const values = outlines[layers.indexOf(one.layer)][heads.indexOf(one.head)];
      if (values !== one.values && !same(values, one.values)) { // an edit leaves the layers before it as they are
        one.values = values;
        one.outline = values ? outlined(values) : null;
        one.tile.querySelector("svg").innerHTML = one.outline ? '<path d="' + one.outline.line + '" vector-effect="non-scaling-stroke"/>' : "";
        one.without = one.outline ? "" : values === false ? "token index" : values ? "no positions" : "left out";
      }
    }
    const control = known && map.control ? ", null " + number(map.control[row][column], 3) : "";
    if (!outlines) Object.assign(one, { values: undefined, outline: null, without: "" });
    const text = known && map.texts ? map.texts[row][column] || "none" : null;
    const means = text !== null && map.meanings ? parted(text).filter((part) => map.meanings[part]).map((part) => "\n" + part + ": " + map.meanings[part]).join("") : "";
    const said = nameOf(one.pair) + " (" + one.layer.name + ")" + control + (map ? ", " + map.title + mean + ": " + (text !== null ? text + means : number(one.value, 3)) + (known && map.most && map.most[row][column] - one.value > 0.05 ? " to " + number(map.most[row][column], 3) : "") : "");
    one.tile.title = said + (one.outline ? ". Drawn: the chosen prompt, in which the head's positions range over " + number(one.outline.range, 3) : "");
    one.tile.setAttribute("aria-label", said);
    one.tile.style.setProperty("--score", known ? map.colours[row][column] : "transparent");
    one.tile.querySelector(".tile-score").textContent = text !== null ? (text === "none" ? "" : text) : map ? number(one.value !== null && Math.abs(one.value) < 5e-3 * map.ends[1] ? 0 : one.value, 3) : "";
    one.tile.classList.toggle("same", Boolean(one.without));
    one.tile.querySelector(".as").textContent = one.without;
    one.tile.tabIndex = -1;
  }

  function byLayer(matched, alike) {
    return layers.flatMap((layer, row) => {
      const own = matched.filter((one) => one.layer === layer);
      if (!own.length) return [];
      const shared = alike && alike[row] && heads.length > 1;
      const name = el("span", { className: "row", textContent: layer.layer + (names.length > 1 || !part.grid.classList.contains("dense") ? " " + layer.name : "") + (shared ? ", heads share positions" : "") });
      name.style.setProperty("--scheme", ink(layer.colour));
      for (const one of shared ? own.slice(1) : []) { // positions that all heads share are drawn once
        one.tile.classList.add("same");
        one.tile.querySelector(".as").textContent = "as H" + own[0].head;
      }
      return [name, ...heads.map((head) => { const one = own.find((other) => other.head === head); return one ? one.tile : el("span"); })];
    });
  }

  return function draw({ maps, outlines: given, by_index: byIndex, alike, prompt }, settings, shown, colours) {
    const outlines = given && byIndex && byIndex.flat().every((one) => one) ? null : given && given.map((row, layer) => row.map((values, head) => (byIndex && byIndex[layer][head] ? false : values)));
    const focus = document.activeElement;
    // A row of positions that all heads of a layer share is drawn once, also where nobody says so
    if (!alike && outlines) alike = outlines.map((row) => row.length > 1 && Boolean(row[0]) && row.every((values) => same(values, row[0])));
    const named = maps.find((map) => map.title === settings.score) || maps[0], map = ofPrompts(named, settings.of, prompt);
    if (!same([...part.score.options].map((one) => one.value), maps.map((one) => one.title))) part.score.replaceChildren(...maps.map((one) => option(one.title, one.title)));
    const at = { ...settings, score: named ? named.title : "", from: settings.from ?? part.from.min, to: settings.to ?? part.to.max, least: settings.least ?? "" };
    for (const name of Object.keys(MAP)) if (document.activeElement !== part[name]) part[name].value = at[name];
    part.score.disabled = !maps.length;
    of.hidden = !named || !named.prompts;
    const mean = map && map.mean ? " (" + map.mean + ")" : "", ranked = settings.order !== "layers";
    for (const one of tiles) {
      drawTile(one, map, outlines, mean);
      const chosen = shown.findIndex((pair) => same(pair, one.pair));
      one.tile.querySelector(".tile-name").textContent = (ranked ? "L" + one.layer.layer + " " : "") + "H" + one.head;
      one.tile.setAttribute("aria-pressed", String(chosen >= 0));
      if (chosen >= 0) one.tile.style.setProperty("--chosen", colours[chosen]);
    }
    const matched = tiles.filter((one) => (settings.scheme === "" || one.layer.name === settings.scheme) && one.layer.layer >= Number(at.from) && one.layer.layer <= Number(at.to) && (settings.least === null || (one.value !== null && one.value >= settings.least)));
    const sign = settings.order === "largest" ? -1 : 1, rank = (one) => (one.value === null ? Infinity : sign * one.value);
    part.grid.classList.toggle("ranked", ranked);
    part.grid.classList.toggle("plain", !outlines);
    part.grid.classList.toggle("dense", !outlines && !ranked && Math.max(layers.length, heads.length) > COLUMNED);
    part.grid.style.setProperty("--heads", heads.length);
    part.grid.style.setProperty("--layers", layers.length);
    const above = part.grid.classList.contains("dense") ? [el("span"), ...heads.map((head) => el("span", { className: "column", textContent: "H" + head }))] : [];
    const placed = ranked ? matched.sort((a, b) => (rank(a) === rank(b) ? 0 : rank(a) - rank(b))).map((one) => one.tile) : [...above, ...byLayer(matched, alike)];
    const places = JSON.stringify([ranked, above.length, alike, matched.map((one) => one.pair), layers.map((layer) => ink(layer.colour))]);
    if (places !== part.places) part.grid.replaceChildren(...placed);
    part.places = places;
    const first = part.grid.querySelector('.tile[aria-pressed="true"]') || part.grid.querySelector(".tile");
    if (first) first.tabIndex = 0;
    if (focus && part.grid.contains(focus)) focus.focus();
    const chosen = JSON.stringify([places, shown]);
    if (first && chosen !== part.chosen) intoView(first);
    part.chosen = chosen;
    part.counted.textContent = matched.length + " of " + tiles.length + " heads";
    part.hint.textContent = (map ? (above.length || map.texts ? "Color of a head: " : "Color and number of a head: ") + map.title + mean + (map.meaning ? ": " + map.meaning : "") + ". " + meant(map) : "This run has no score of heads. ") + (outlines ? "Drawn: positions over the chosen prompt, each on its own scale. " : "") + "A click shows the head, Shift-click several.";
    part.scale.hidden = !map;
    part.kinds.replaceChildren(...(map && map.texts ? kindsOf(map) : []));
    if (!map) return;
    if (map.texts) part.scale.hidden = true;
    part.scale.children[0].textContent = number(map.ends[0], 3);
    part.scale.children[1].hidden = !map.scale;
    if (map.scale) part.scale.children[1].style.background = "linear-gradient(to right, " + map.scale.join(", ") + ")";
    part.scale.children[2].textContent = (map.scale ? "" : "to ") + number(map.ends[1], 3);
  };
}
