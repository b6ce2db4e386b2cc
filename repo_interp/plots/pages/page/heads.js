// A map of heads: one cell per layer and head. A click opens the head in the explorer; arrow keys move from cell to cell. Every map of the
// page marks the head that was chosen last, and says its value.
"use strict";

window.drawHeadMaps = function (place, maps, page) {
  const digits = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));
  const made = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const choice = made("select");
  choice.append(...maps.map((map, number) => new Option(map.title, number)));
  const label = maps.length > 1 ? made("label", {}, "Map of ", choice) : made("span", {}, maps[0].title);
  const told = made("output");
  told.setAttribute("aria-live", "polite");
  const grid = made("div", { className: "head-map" });
  grid.setAttribute("role", "group");
  const scale = made("span", { className: "head-scale" });
  let chosen = null;

  function said(map, row, column) {
    const layer = map.layers[row];
    const control = map.control === null ? "" : ", control " + digits(map.control[row][column]);
    const mean = map.mean ? ", " + map.mean : "";
    return "L" + layer.layer + " H" + map.heads[column] + " (" + layer.name + "): " + digits(map.values[row][column]) + control + mean;
  }

  function draw(map) {
    choice.title = map.title;
    grid.style.setProperty("--heads", map.heads.length);
    grid.setAttribute("aria-label", map.title + ", a cell per layer and head");
    const cells = [];
    const shown = [made("span", { className: "corner" }), ...map.heads.map((head) => made("span", { className: "column" }, String(head)))];
    map.layers.forEach((layer, row) => {
      const name = made("span", { className: "row", title: layer.name }, String(layer.layer));
      name.style.setProperty("--scheme", page.ink(layer.colour));
      shown.push(name);
      map.heads.forEach((head, column) => {
        const cell = made("button", { type: "button", title: said(map, row, column), tabIndex: cells.length ? -1 : 0 });
        cell.style.background = map.colours[row][column];
        cell.dataset.head = layer.layer + "/" + head;
        cell.setAttribute("aria-label", cell.title);
        cell.addEventListener("click", () => { if (page.showHead) page.showHead(layer.layer, head); });
        for (const event of ["focus", "mouseenter"]) cell.addEventListener(event, () => { told.textContent = cell.title; });
        cells.push(cell);
        shown.push(cell);
      });
    });
    grid.replaceChildren(...shown);
    grid.onkeydown = (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -map.heads.length, ArrowDown: map.heads.length };
      const from = cells.indexOf(document.activeElement);
      const next = cells[from + steps[event.key]];
      if (from < 0 || !next) return;
      event.preventDefault();
      cells[from].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    };
    const bar = made("span", { className: "bar" });
    bar.style.background = "linear-gradient(to right, " + map.scale.join(", ") + ")";
    scale.replaceChildren(digits(map.ends[0]), bar, digits(map.ends[1]));
    mark();
  }

  function mark() {
    for (const cell of grid.querySelectorAll("button")) {
      const own = cell.dataset.head === chosen;
      cell.setAttribute("aria-pressed", String(own));
      if (own) told.textContent = cell.title;
    }
  }

  page.events.addEventListener("head-chosen", (event) => { chosen = event.detail.layer + "/" + event.detail.head; mark(); });

  choice.addEventListener("change", () => draw(maps[Number(choice.value)]));
  place.append(made("div", { className: "controls" }, label, scale, told), grid);
  if (page.showHead) place.append(made("p", { className: "hint" }, "Rows are layers, columns heads. Click a head to show it in place of the chosen one."));
  place.hidden = false;
  draw(maps[0]);
};
