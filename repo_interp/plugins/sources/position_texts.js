// Rows of positions by distance, then the text of a prompt, once per kind of heads, colored by the positions of one head: purple below their median, orange above it. A slider
// moves through the layers that have a head of the kind; of a layer the clearest is shown. Texts and positions are the explorer's answers.
window.reportSections.position_sources = function (section, data, page) {
  const MOST = 1500; // tokens that are colored
  const sizeOf = (value) => (value === null ? -1 : Math.abs(value));
  const largest = (values) => values.reduce((best, value, place) => (sizeOf(value) > sizeOf(values[best]) ? place : best), 0);

  function panel({ kind, says: sentences, where, clear }, source, prompts) {
    const heads = clear.flatMap((row, place) => (row.some((value) => value !== null) ? [{ layer: data.layer[place], head: data.head[largest(row)], column: largest(row), value: row[largest(row)], sentence: sentences[place][largest(row)] }] : []));
    const count = clear.flat().filter((value) => value !== null).length;
    const slider = el("input", { type: "range", min: 0, max: heads.length - 1, oninput: draw }), chosen = () => heads[slider.value], pair = () => [chosen().layer, chosen().head];
    slider.value = largest(heads.map(({ value }) => value));
    const show = button("", () => page.showHead(...pair()), { className: "open" }), says = el("p", { className: "said", "aria-live": "polite" });
    const strip = el("div", { className: "strip", role: "img", "aria-label": "All tokens in a row" }), ends = [0, 0, 0].map(() => el("span"));
    const text = el("div", { className: "colored", tabIndex: 0, role: "group", "aria-label": "The prompt; a head that " + kind, lang: "", dir: "auto" });

    // Positions of the chosen head, or its gates.
    function valuesAt(place) {
      const block = (data.gates[source.open().numbers[place]] || {})[chosen().layer];
      return block ? valuesOf(block)[block.row[chosen().column]] : source.view({ prompt: place, heads: [pair()], token: 0 }).numbers.position.values[0];
    }

    function draw() {
      const { tokens, joint } = source.prompt({ prompt: Number(prompts.value) }), values = valuesAt(Number(prompts.value)).slice(0, MOST);
      const sorted = values.filter((value) => value !== null).sort((one, other) => one - other), at = (share) => sorted[Math.round(share * (sorted.length - 1))];
      const median = at(0.5), reach = Math.max(at(0.98) - median, median - at(0.02)) || 1;
      const colors = values.map((value) => "color-mix(in srgb, " + (value < median ? "#7b5fc0" : "#f08a24") + " " + (value === null ? 0 : 85 * Math.min(1, Math.abs(value - median) / reach)).toFixed(1) + "%, transparent)");
      strip.style.backgroundImage = "linear-gradient(to right, " + colors.map((color, token) => color + " " + ((100 * token) / colors.length).toFixed(2) + "% " + ((100 * (token + 1)) / colors.length).toFixed(2) + "%").join(", ") + ")";
      text.replaceChildren(...values.flatMap((value, token) => {
        const node = el("span", { textContent: readable(tokens[token]), title: "token " + token + ": " + number(value, 5) });
        node.style.backgroundColor = colors[token];
        return tokens[token].includes("\n") ? [node, el("br")] : [node, joint];
      }), !values.length ? "Positions of this layer are left out of this page." : values.length < tokens.length ? "… the first " + values.length + " of " + tokens.length + " tokens" : "");
      show.textContent = "show " + nameOf(pair());
      says.textContent = nameOf(pair()) + ": " + chosen().sentence;
      const limits = [median - reach, median, median + reach];
      ends.forEach((node, side) => { node.textContent = number(limits[side], 3); });
    }

    const card = el("article", { className: "panel" }, el("h4", { textContent: kind + ": " + count + " of " + data.named + " heads" }),
      el("div", { className: "controls" }, heads.length > 1 ? field("Layer", slider) : null, show), says, strip, text, el("p", { className: "spectrum" }, ...ends), el("p", { className: "said", textContent: where }));
    return { card, draw };
  }

  page.onReady.push(() => {
    if (!page.source) return;
    const { prompts: counts, numbers } = page.source.open();
    const prompts = el("select", { onchange: () => panels.forEach(({ draw }) => draw()) }, ...counts.map((count, place) => option(place, numbers[place] + " (" + count + " tokens)")));
    const panels = data.kinds.map((kind) => panel(kind, page.source, prompts)), root = section.querySelector(".position-texts");
    // Of two prompts that can be chosen on one page, one follows the other
    page.events.addEventListener("chosen", () => {
      const place = numbers.indexOf(page.chosen().prompt);
      if (place < 0 || String(place) === prompts.value) return;
      prompts.value = place;
      panels.forEach(({ draw }) => draw());
    });
    prompts.addEventListener("change", () => page.follow({ prompt: numbers[prompts.value] }));
    const rows = data.picture && el("figure", {}, el("img", { src: data.picture.source, width: data.picture.width, alt: data.picture.caption, style: "max-width: 100%; height: auto" }), el("figcaption", { textContent: data.picture.caption }));
    root.replaceChildren(...(rows ? [rows] : []), ...(counts.length > 1 ? [field("Prompt", prompts)] : []), el("div", { className: "panels" }, ...panels.map(({ card }) => card)),
      el("p", { className: "hint", textContent: "Color: the " + (Object.keys(data.gates).length ? "position (CoPE: the mean gate)" : "position") + " of a token, none at the head's median; the numbers below a text are the ends of its colors. Point at a token for its number." }));
    panels.forEach(({ draw }) => draw());
    root.hidden = false;
  });
};
