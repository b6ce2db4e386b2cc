// The table of heads: sorted by a click on a column, filtered by words and numbers. A click on a row opens the head in the explorer; the row
// of the head that was chosen last, here or elsewhere on the page, is marked.
"use strict";

window.reportSections = window.reportSections || {};

window.reportSections.atlas = function (section, data, page) {
  const find = (name) => section.querySelector("#atlas-" + name);
  const made = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const columns = [
    { name: "head", title: "layer and head", text: false, values: data.heads.map((_, row) => row) },
    { name: "scheme", title: "position scheme", text: true, values: data.schemes },
    ...data.columns,
  ];
  const place = (row) => "L" + data.heads[row][0] + " H" + data.heads[row][1];
  const shown = (value) => (value === null ? "–" : String(Number(value.toPrecision(3))));
  const state = { column: columns[0], descending: false };
  let chosen = null;

  const headers = columns.map((column) => {
    const button = made("button", { type: "button", title: column.title }, column.name.replaceAll("_", " "));
    const header = made("th", { scope: "col" }, button);
    button.addEventListener("click", () => {
      state.descending = state.column === column ? !state.descending : !column.text && column !== columns[0];
      state.column = column;
      draw();
    });
    return header;
  });
  find("table").tHead.append(made("tr", {}, ...headers));

  const rows = data.heads.map(([layer, head], row) => {
    const open = made("button", { type: "button", title: "show this head" }, place(row));
    const cells = columns.slice(1).map((column) => made("td", { className: column.text ? "" : "number" }, column.text ? column.values[row] : shown(column.values[row])));
    const element = made("tr", {}, made("td", {}, open), ...cells);
    element.addEventListener("click", () => { if (page.showHead) page.showHead(layer, head); });
    return element;
  });

  // "induction>0.2" as a test of a row; null where it is none. A column may be named without its spaces and underscores.
  const bare = (name) => name.toLowerCase().replace(/[\s_]/g, "");
  function comparison(word) {
    const parts = word.match(/^(.+?)([<>])(-?[\d.]+(?:e-?\d+)?)$/i);
    const column = parts && columns.find((one) => !one.text && one !== columns[0] && bare(one.name) === bare(parts[1]));
    if (!column) return null;
    const limit = Number(parts[3]);
    return (row) => column.values[row] !== null && (parts[2] === ">" ? column.values[row] > limit : column.values[row] < limit);
  }

  const names = columns.find((column) => column.name === "name");
  const namesOf = (row) => (names ? names.values[row].split(", ").filter(Boolean) : []);
  const all = [...new Set(data.heads.flatMap((_, row) => namesOf(row)))].sort();
  find("name").append(new Option("any", ""), ...all.map((name) => new Option(name, name)), new Option("none", "-"));

  function tests() {
    const made = find("filter").value.trim().split(/\s+/).filter(Boolean).map((word) => {
      const text = word.toLowerCase();
      return comparison(word) || ((row) => {
        const places = place(row).toLowerCase().split(" ");
        return /^[lh]\d+$/.test(text) ? places.includes(text) : [namesOf(row).join(" "), data.schemes[row]].join(" ").toLowerCase().includes(text);
      });
    });
    const name = find("name").value;
    if (name === "-") made.push((row) => !namesOf(row).length);
    else if (name) made.push((row) => namesOf(row).includes(name));
    return made;
  }

  function draw() {
    const { column, descending } = state;
    const wanted = tests();
    const kept = data.heads.map((_, row) => row).filter((row) => wanted.every((test) => test(row)));
    const empty = (row) => column.values[row] === null || column.values[row] === "";
    kept.sort((one, other) => {
      if (empty(one) || empty(other)) return empty(one) - empty(other) || one - other; // what is missing comes last
      const [a, b] = [column.values[one], column.values[other]];
      return (a < b ? -1 : a > b ? 1 : 0) * (descending ? -1 : 1) || one - other;
    });
    find("table").tBodies[0].replaceChildren(...kept.map((row) => rows[row]));
    headers.forEach((header, number) => {
      if (columns[number] === column) header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    find("said").textContent = kept.length + " of " + rows.length + " heads";
  }

  page.events.addEventListener("head-chosen", (event) => {
    if (chosen !== null) rows[chosen].removeAttribute("aria-current");
    const row = data.heads.findIndex(([layer, head]) => layer === event.detail.layer && head === event.detail.head);
    chosen = row < 0 ? null : row;
    if (chosen !== null) rows[chosen].setAttribute("aria-current", "true");
  });
  find("filter").addEventListener("input", draw);
  find("name").addEventListener("change", draw);
  find("live").hidden = false;
  draw();
};
