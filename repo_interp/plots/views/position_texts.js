// The text of a prompt, once per kind of heads, colored by the positions of one head: purple below their median, orange above it. A slider
// moves through the layers that have a head of the kind.
window.reportSections.position_sources = function (section, data, page) {
  const root = section.querySelector(".position-texts"), panels = el("div", { className: "panels" });
  const prompts = el("select", { onchange: () => draws.forEach((draw) => draw()) }, ...data.prompts.map(({ prompt, count }, place) => option(place, prompt + " (" + count + " tokens)")));

  function panel({ kind, said, where, heads, says, start }, row) {
    const slider = el("input", { type: "range", min: 0, max: heads.length - 1, value: start, oninput: draw });
    const show = button("", () => page.showHead && page.showHead(...heads[slider.value]), { className: "open" });
    const head = el("p", { className: "said", "aria-live": "polite" }), [low, middle, high] = [0, 0, 0].map(() => el("span")), strip = el("div", { className: "strip", role: "img", "aria-label": "All tokens in a row" });
    const text = el("div", { className: "colored", tabIndex: 0, role: "group", "aria-label": "The prompt, colored by a head that " + kind, lang: "", dir: "auto" });
    panels.append(el("article", { className: "panel" }, el("h4", { textContent: kind + ": " + said }),
      el("div", { className: "controls" }, ...(heads.length > 1 ? [field("Layer", slider)] : []), show), head, strip, text, el("p", { className: "spectrum" }, low, middle, high), el("p", { className: "said", textContent: where })));

    function draw() {
      const { texts, joint, rows, count } = data.prompts[prompts.value], packed = packedNumbers(rows[row][slider.value]);
      const values = Array.from({ length: packed.byteLength / 4 }, (_, token) => finite(packed.getFloat32(4 * token, true)));
      const sorted = values.filter((value) => value !== null).sort((one, other) => one - other), at = (share) => sorted[Math.round(share * (sorted.length - 1))];
      const median = at(0.5), reach = Math.max(at(0.98) - median, median - at(0.02)) || 1;
      const colors = values.map((value) => "color-mix(in srgb, " + (value < median ? "#7b5fc0" : "#f08a24") + " " + (value === null ? 0 : 85 * Math.min(1, Math.abs(value - median) / reach)).toFixed(1) + "%, transparent)");
      strip.style.backgroundImage = "linear-gradient(to right, " + colors.map((color, token) => color + " " + ((100 * token) / colors.length).toFixed(2) + "% " + ((100 * (token + 1)) / colors.length).toFixed(2) + "%").join(", ") + ")";
      text.replaceChildren(...values.flatMap((value, token) => {
        const own = texts ? texts[token] : String(token), node = el("span", { textContent: readable(own), title: "token " + token + ": " + number(value, 5) });
        node.style.backgroundColor = colors[token];
        return own.includes("\n") ? [node, el("br")] : [node, texts ? joint : " "];
      }), values.length < count ? "… the first " + values.length + " of " + count + " tokens" : "");
      show.textContent = "show " + nameOf(heads[slider.value]);
      head.textContent = nameOf(heads[slider.value]) + ": " + says[slider.value];
      for (const [node, value] of [[low, median - reach], [middle, median], [high, median + reach]]) node.textContent = number(value, 3);
    }
    return draw;
  }

  const draws = data.kinds.map(panel);
  root.append(...(data.prompts.length > 1 ? [field("Prompt", prompts)] : []), panels, el("p", { className: "hint", textContent: "Color: " + data.unit + " of a token, none at the head's median; numbers below a text are the ends of its colors. Point at a token for its number." }));
  root.hidden = false;
  draws.forEach((draw) => draw());
};
