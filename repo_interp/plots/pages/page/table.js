// A table of heads: sorted by a click on a column, filtered by words, names and numbers. A click on a row opens its head.
import { button, el, field, nameOf, number, option, same } from "./dom.js";

// `columns` [{name, title, text, values}] of `heads` [[layer, head]], with their schemes. The result marks the rows of the heads that are shown.
export function headTable(place, { heads, schemes, columns, open }) {
  const all = [{ name: "head", title: "layer and head", text: false, values: heads.map((_, row) => row) }, { name: "scheme", title: "position scheme", text: true, values: schemes }, ...columns];
  const state = { column: all[0], descending: false };
  const names = columns.find((column) => column.name === "name");
  const namesOf = (row) => (names && names.values[row] ? names.values[row].split(", ").filter(Boolean) : []);
  const known = [...new Set(heads.flatMap((_, row) => namesOf(row)))].sort();
  const filter = el("input", { type: "search", className: "filter", spellcheck: false, autocomplete: "off", placeholder: ["L3", ...known.slice(0, 1), ...columns.filter((column) => !column.text).slice(0, 1).map((column) => column.name + ">0.2")].join("   "), oninput: draw });
  const name = el("select", { onchange: draw }, option("", "any"), ...known.map((one) => option(one, one)), option("-", "none"));
  const told = el("output", { "aria-live": "polite" }), body = el("tbody");

  const headers = all.map((column) => el("th", { scope: "col" }, button(column.name.replaceAll("_", " "), () => {
    state.descending = state.column === column ? !state.descending : !column.text && column !== all[0];
    state.column = column;
    draw();
  }, { title: column.title })));
  const rows = heads.map((pair, row) => el("tr", { onclick: (event) => open(pair, event.shiftKey) }, el("td", {}, button(nameOf(pair), () => {}, { className: "small", title: "show this head" })),
    ...all.slice(1).map((column) => el("td", { className: column.text ? "" : "number", textContent: column.text ? column.values[row] ?? "" : number(column.values[row], 3) }))));

  // "induction>0.2" as a test of a row; null where it is none. A column may be named without its spaces and underscores.
  const bare = (text) => text.toLowerCase().replace(/[\s_]/g, "");
  function comparison(word) {
    const parts = word.match(/^(.+?)([<>])(-?[\d.]+(?:e-?\d+)?)$/i);
    const column = parts && columns.find((one) => !one.text && bare(one.name) === bare(parts[1])), limit = parts && Number(parts[3]);
    return column ? (row) => column.values[row] !== null && (parts[2] === ">" ? column.values[row] > limit : column.values[row] < limit) : null;
  }

  function tests() {
    const made = filter.value.trim().split(/\s+/).filter(Boolean).map((word) => {
      const text = word.toLowerCase();
      return comparison(word) || ((row) => (/^[lh]\d+$/.test(text) ? nameOf(heads[row]).toLowerCase().split(" ").includes(text) : [namesOf(row).join(" "), schemes[row]].join(" ").toLowerCase().includes(text)));
    });
    if (name.value === "-") made.push((row) => !namesOf(row).length);
    else if (name.value) made.push((row) => namesOf(row).includes(name.value));
    return made;
  }

  function draw() {
    const { column, descending } = state, wanted = tests();
    const kept = heads.map((_, row) => row).filter((row) => wanted.every((test) => test(row)));
    const empty = (row) => column.values[row] === null || column.values[row] === "";
    kept.sort((one, other) => {
      if (empty(one) || empty(other)) return empty(one) - empty(other) || one - other; // what is missing comes last
      const [a, b] = [column.values[one], column.values[other]];
      return (a < b ? -1 : a > b ? 1 : 0) * (descending ? -1 : 1) || one - other;
    });
    body.replaceChildren(...kept.map((row) => rows[row]));
    headers.forEach((header, place) => {
      if (all[place] === column) header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    told.textContent = kept.length + " of " + rows.length + " heads";
  }

  place.append(el("div", { className: "controls" }, field("Filter", filter), field("Name", name), told), el("div", { className: "scroll tall heads" }, el("table", {}, el("thead", {}, el("tr", {}, ...headers)), body)),
    el("p", { className: "hint", textContent: "One row per head; a click on a column sorts by it, another turns the order round. Filter by words of a head's name, scheme or place (L3, H1), and by numbers: column>value, column<value; all must hold. A click on a row opens the head." }));
  draw();
  return (shown) => rows.forEach((element, row) => {
    if (shown.some((pair) => same(pair, heads[row]))) element.setAttribute("aria-current", "true");
    else element.removeAttribute("aria-current");
  });
}
