// The map of heads: the positions of every head over the chosen prompt as a small drawing, coloured by a score, sorted and filtered. A click
// opens the head in the explorer.
"use strict";

// `explorer`: layers, heads, prompt(), row(layer, head) -> values or null, alike(layer), open(layer, head), page.
window.headGallery = function (section, explorer) {
  const BINS = 60; // columns of a drawing of a long prompt
  const prefix = section.dataset.side === undefined ? "#" : "#" + section.dataset.side + "-";
  const find = (name) => section.querySelector(prefix + "gallery-" + name);
  const maps = explorer.page.headMaps;
  const tiles = new Map();
  let drawnMap = null;
  const digits = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(3))));

  // The map that colours heads: means over prompts, or in their place the largest value of all prompts or that of the chosen one.
  function shown() {
    const map = maps[find("score").value], of = find("of").value;
    find("of").parentElement.hidden = !map || !map.prompts;
    if (!map || !map.prompts || of === "mean") return map;
    const place = map.prompts.numbers.indexOf(explorer.prompt().prompt), known = map.prompts.values;
    const values = map.layers.map((_, row) => map.heads.map((_, column) => {
      const own = known.map((prompt) => prompt[row][column]).filter((value) => value !== null);
      if (of === "chosen") return place < 0 ? null : known[place][row][column];
      return own.length ? Math.max(...own) : null;
    }));
    const finite = values.flat().filter((value) => value !== null), reach = Math.max(...finite.map(Math.abs), 0) || 1;
    const ends = finite.some((value) => value < 0) ? [-reach, reach] : [0, reach];
    const last = map.scale.length - 1;
    const colours = values.map((row) => row.map((value) => (value === null ? "#d9d9d9" : map.scale[Math.round((last * (value - ends[0])) / (ends[1] - ends[0]))])));
    return { ...map, values, colours, ends, mean: of === "chosen" ? "prompt " + explorer.prompt().prompt : "largest of " + known.length + " prompts" };
  }

  // How far most of a map's heads reach, as a share of its scale: small where they differ little.
  function spread(map) {
    const values = map.values.flat().filter((value) => value !== null).sort((a, b) => a - b);
    return (values[Math.floor(0.9 * (values.length - 1))] - values[Math.floor(0.1 * (values.length - 1))]) / (map.ends[1] - map.ends[0]) || 0;
  }

  function score(layer, head) {
    const map = drawnMap;
    if (!map) return { value: null, colour: null };
    const row = map.layers.findIndex((one) => one.layer === layer), column = map.heads.indexOf(head);
    if (row < 0 || column < 0) return { value: null, colour: null };
    return { value: map.values[row][column], colour: map.colours[row][column] };
  }

  // The outline of `values` as an SVG path in a box of 100 x 40: every token, or the smallest and largest of each column.
  function path(values) {
    const known = values.filter(Number.isFinite);
    if (!known.length) return null;
    let low = Infinity, high = -Infinity;
    for (const value of known) { low = Math.min(low, value); high = Math.max(high, value); }
    const y = (value) => (high > low ? 37 - (34 * (value - low)) / (high - low) : 20).toFixed(1);
    const x = (place) => ((100 * (place + 0.5)) / values.length).toFixed(1);
    const points = [];
    if (values.length <= 2 * BINS) {
      values.forEach((value, place) => { if (Number.isFinite(value)) points.push(x(place) + " " + y(value)); });
    } else {
      for (let bin = 0; bin < BINS; bin++) {
        const from = Math.floor((bin * values.length) / BINS), part = values.slice(from, Math.floor(((bin + 1) * values.length) / BINS));
        const ends = [Math.min(...part), Math.max(...part)];
        if (part[0] > part[part.length - 1]) ends.reverse();
        for (const end of ends) if (Number.isFinite(end)) points.push(x(from + part.length / 2 - 0.5) + " " + y(end));
      }
    }
    return { line: "M" + points.join("L"), range: high - low };
  }

  function shades() {
    const prompt = explorer.prompt();
    return explorer.drawnSpans().filter((name) => !name.includes(".")).map((name) => prompt.spans[name].map(([first, last]) =>
      '<rect x="' + (100 * first) / prompt.count + '" width="' + (100 * (last + 1 - first)) / prompt.count + '" y="0" height="40" fill="' +
      explorer.colourOf(name) + '" opacity="0.3"/>').join("")).join("");
  }

  function drawTiles() {
    const ground = shades();
    for (const layer of explorer.layers) {
      for (const head of explorer.heads) {
        const key = layer.layer + "/" + head;
        if (!tiles.has(key)) {
          const tile = document.createElement("button");
          tile.type = "button";
          tile.className = "tile";
          tile.dataset.head = key;
          tile.innerHTML = '<span class="tile-name"></span><span class="tile-score"></span><svg viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true"></svg><span class="as"></span>';
          tile.addEventListener("click", () => explorer.open(layer.layer, head));
          tiles.set(key, { tile, layer, head });
        }
        const one = tiles.get(key);
        const values = explorer.row(layer.layer, head);
        const drawn = values && path(values);
        one.range = drawn ? drawn.range : null;
        one.tile.querySelector("svg").innerHTML = drawn
          ? ground + '<path d="' + drawn.line + '" fill="none" vector-effect="non-scaling-stroke"/>'
          : '<text x="50" y="24" text-anchor="middle" font-size="9">' + (values ? "no positions" : "left out") + "</text>";
      }
    }
  }

  function matching() {
    const scheme = find("scheme").value, from = Number(find("from").value), to = Number(find("to").value);
    const least = find("least").value === "" ? -Infinity : Number(find("least").value);
    return [...tiles.values()].filter((one) =>
      (scheme === "" || one.layer.name === scheme) && from <= one.layer.layer && one.layer.layer <= to &&
      (least === -Infinity || (one.value !== null && one.value >= least)));
  }

  function arrange() {
    const map = shown();
    drawnMap = map;
    for (const one of tiles.values()) {
      const { value, colour } = score(one.layer.layer, one.head);
      one.value = value;
      one.tile.style.setProperty("--score", colour || "transparent");
      one.tile.style.setProperty("--scheme", explorer.page.ink(one.layer.colour));
      one.tile.querySelector(".tile-score").textContent = map ? digits(value) : "";
      one.tile.title = "L" + one.layer.layer + " H" + one.head + " (" + one.layer.name + ")" + (map ? ": " + map.title + (map.mean ? ", " + map.mean : "") + ": " + digits(value) : "") +
        (one.range === null ? "" : ". Drawn: the chosen prompt, in which the head's positions range over " + digits(one.range));
      one.tile.setAttribute("aria-label", one.tile.title);
      one.tile.tabIndex = -1;
    }
    const matched = matching(), order = find("order").value, grid = find("grid");
    const nodes = [];
    grid.classList.toggle("ranked", order !== "layers");
    for (const one of tiles.values()) {
      one.tile.classList.remove("same");
      one.tile.querySelector(".tile-name").textContent = (order === "layers" ? "" : "L" + one.layer.layer + " ") + "H" + one.head;
    }
    grid.style.setProperty("--heads", explorer.heads.length);
    if (order === "layers") {
      for (const layer of explorer.layers) {
        const own = matched.filter((one) => one.layer === layer);
        if (!own.length) continue;
        const name = document.createElement("span");
        name.className = "row";
        name.style.setProperty("--scheme", explorer.page.ink(layer.colour));
        name.textContent = layer.layer + " " + layer.name + (explorer.heads.length > 1 && explorer.alike(layer.layer) ? ", heads share positions" : "");
        nodes.push(name);
        // Positions that all heads share are drawn once.
        for (const one of explorer.alike(layer.layer) ? own.slice(1) : []) {
          one.tile.classList.add("same");
          one.tile.querySelector(".as").textContent = "as H" + own[0].head;
        }
        for (const head of explorer.heads) {
          const one = own.find((other) => other.head === head);
          nodes.push(one ? one.tile : document.createElement("span"));
        }
      }
    } else {
      const sign = order === "largest" ? -1 : 1;
      const place = (one) => (one.value === null ? Infinity : sign * one.value);
      nodes.push(...matched.sort((a, b) => (place(a) === place(b) ? 0 : place(a) - place(b))).map((one) => one.tile));
    }
    grid.replaceChildren(...nodes);
    const first = grid.querySelector('.tile[aria-pressed="true"]') || grid.querySelector(".tile");
    if (first) first.tabIndex = 0;
    find("said").textContent = matched.length + " of " + tiles.size + " heads";
    find("mean").textContent = map ? "Colour and number of a head: " + map.title + (map.mean ? ", " + map.mean : "") + "." : "";
    find("score").title = map ? map.title : "";
    const bar = find("scale");
    bar.hidden = !map;
    if (map) {
      bar.children[0].textContent = digits(map.ends[0]);
      bar.children[1].style.background = "linear-gradient(to right, " + map.scale.join(", ") + ")";
      bar.children[2].textContent = digits(map.ends[1]);
    }
  }

  // Arrow keys move to the nearest drawing in that direction.
  function keys(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in steps) || !document.activeElement.classList.contains("tile")) return;
    event.preventDefault();
    const [right, down] = steps[event.key];
    const from = document.activeElement, own = from.getBoundingClientRect();
    let best = null, least = Infinity;
    for (const tile of find("grid").querySelectorAll(".tile")) {
      const place = tile.getBoundingClientRect();
      const x = place.left - own.left, y = place.top - own.top;
      if (x * right + y * down <= 1) continue;
      const far = right ? Math.abs(x) + 100 * Math.abs(y) : Math.abs(y) + 0.01 * Math.abs(x);
      if (far < least) { least = far; best = tile; }
    }
    if (!best) return;
    from.tabIndex = -1;
    best.tabIndex = 0;
    best.focus();
  }

  const names = [...new Set(explorer.layers.map((layer) => layer.name))];
  find("score").append(...(maps.length ? maps.map((map, place) => new Option(map.title, place)) : [new Option("nothing: this run has no score of heads", -1)]));
  find("scheme").append(new Option("all", ""), ...names.map((name) => new Option(name, name)));
  find("scheme").parentElement.hidden = names.length < 2;
  const numbers = explorer.layers.map((layer) => layer.layer);
  for (const [name, value] of [["from", Math.min(...numbers)], ["to", Math.max(...numbers)]]) {
    Object.assign(find(name), { value, min: Math.min(...numbers), max: Math.max(...numbers) });
  }
  for (const name of ["score", "of", "order", "scheme", "from", "to", "least"]) {
    find(name).addEventListener("input", () => { arrange(); explorer.changed(); });
  }
  find("grid").addEventListener("keydown", keys);

  return {
    draw() { drawTiles(); arrange(); },
    recolour: arrange,
    // Colour heads by the map of `variable` in `group`, or by its first; without one, where `telling`, by that in which they differ most. `prompt`: by the
    // chosen prompt's values, where the map has them.
    colourBy(group, variable, telling, prompt) {
      const named = maps.findIndex((map) => map.group === group && map.variable === variable);
      const of = named < 0 ? maps.findIndex((map) => map.group === group) : named;
      const best = maps.reduce((best, map, place) => (spread(map) > spread(maps[best]) ? place : best), 0);
      if (of >= 0 || (telling && maps.length)) find("score").value = of < 0 ? best : of;
      if (of >= 0) find("of").value = prompt ? "chosen" : "mean";
      arrange();
    },
    mark(chosen, open) {
      for (const [key, one] of tiles) {
        one.tile.setAttribute("aria-pressed", String(key === chosen));
        one.tile.classList.toggle("opened", open.includes(key));
      }
    },
    state: () => ({ score: find("score").value, of: find("of").value === "mean" ? "" : find("of").value, order: find("order").value, scheme: find("scheme").value, layers: find("from").value + "-" + find("to").value, least: find("least").value }),
    restore(given) {
      for (const name of ["score", "of", "order", "scheme", "least"]) {
        const field = find(name), value = given.get(name);
        if (value !== null && (field.tagName !== "SELECT" || [...field.options].some((option) => option.value === value))) field.value = value;
      }
      const range = /^(\d+)-(\d+)$/.exec(given.get("layers") || "");
      if (range) { find("from").value = range[1]; find("to").value = range[2]; }
      arrange();
    },
  };
};
