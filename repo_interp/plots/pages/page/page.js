// Brings every section to life with the data beside it: its interactive part by its own script, then its charts of the chosen head and its
// map of heads. Sections that stand side by side, one per run, each have a page object of their own; what is chosen in one is chosen in
// the others. Knows the colours of the page, light and dark.
"use strict";

(async function () {
  // Unpacks what the page holds as base64 of compressed text.
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }

  // The policy of the page lets an inline script run, and no eval.
  if (window.packedPlotly) document.head.append(Object.assign(document.createElement("script"), { textContent: await unpacked(window.packedPlotly) }));

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const family = getComputedStyle(document.body).fontFamily;

  const shared = {
    // No button that would send anything anywhere.
    config: {
      displaylogo: false, responsive: true, typesetMath: false, showTips: false,
      toImageButtonOptions: { format: "svg" },
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    },
    layout(given) {
      const axis = { gridcolor: colour("--grid"), zerolinecolor: colour("--line"), linecolor: colour("--soft"), ticks: "outside", ticklen: 3, exponentformat: "power" };
      const base = {
        margin: { l: 64, r: 16, t: 12, b: 44 },
        font: { family, size: 12, color: colour("--ink") },
        paper_bgcolor: colour("--paper"),
        plot_bgcolor: colour("--paper"),
        hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--soft"), font: { color: colour("--ink") } },
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
      };
      return Object.assign(base, given, {
        xaxis: Object.assign({}, axis, { showgrid: false, zeroline: false }, given.xaxis),
        yaxis: Object.assign({}, axis, given.yaxis),
      });
    },
    colour,
    // Whether the page stands in a frame of a notebook, which has no address.
    framed: location.protocol === "about:",
    // A colour of a scheme as it can be seen on the page: lighter on dark paper.
    ink(hex) {
      if (!dark.matches) return hex;
      const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
      return "#" + parts.map((part) => Math.round(part + 0.4 * (255 - part)).toString(16).padStart(2, "0")).join("");
    },
    // What is called when colours change, before printing, and when all sections stand.
    onTheme: [],
    onPrint: [],
    onReady: [],
  };

  // What the sections of one run share.
  const pageOfRun = (addressed) => Object.assign(Object.create(shared), {
    // Tells "head-chosen", "token-chosen" and "view-chosen", each with all that is chosen.
    events: new EventTarget(),
    // Whether the address of the page says what is chosen here.
    addressed,
    // Maps of heads of all sections, and the section that draws every head, which needs no map of its own.
    headMaps: [],
    gallery: null,
    // Set by the explorer, where the run says what its prompts are.
    showHead: null,
    chosen: null,
    follow: null,
    // Chooses what it is given of a group's map, prompt, head and token.
    choose: () => {},
    // Set by the charts that hold rows of attention, or logits of pairs, and next tokens.
    attention: () => null,
    attentionMissing: () => "This run does not hold where it looks: analyse again with the measure attention_rows.",
    nearestRow: () => null,
    rowsAreMeasured: false,
    // A row of attention as it is shown: where the reader leaves out token 0, the others get what is left of 1 without its share.
    withoutSink: false,
    shown(row) {
      const sink = row && this.withoutSink && row.size === 1 && row.blocks.find((block) => block.first === 0);
      if (!sink || row.blocks.length === 1) return row;
      const left = row.blocks.filter((block) => block !== sink);
      return { ...row, from: row.from + " without token 0", blocks: left.map((block) => ({ ...block, share: block.share / (1 - sink.share) })) };
    },
    predictions: () => null,
  });

  const all = await Promise.all([...document.querySelectorAll("script.section-data")].map(async (script) => ({
    name: script.dataset.section, section: script.closest("section"),
    content: JSON.parse(script.type === "application/json" ? script.textContent : await unpacked(script.textContent)),
  })));
  const sides = all.filter(({ section }) => section.dataset.side !== undefined);
  const page = bringToLife(all.filter(({ section }) => section.dataset.side === undefined), pageOfRun(true));
  const pages = sides.map((side, place) => bringToLife([side], pageOfRun(place === 0)));
  link(pages.filter((one) => one.follow));
  const first = document.querySelector("#findings button.open");
  if (first) page.opening = placeOf(first);
  shared.onReady.forEach((ready) => ready());

  function bringToLife(sections, page) {
    for (const { name, content } of sections) page.headMaps.push(...content.maps.map((map) => ({ ...map, group: name })));
    for (const { name, section, content } of sections) {
      const draw = (window.reportSections || {})[name];
      if (draw && content.data !== null) draw(section, content.data, page);
    }
    if (!page.showHead) followWithoutExplorer(sections, page);
    for (const { section, content } of sections) {
      if (content.charts.length) window.drawHeadCharts(section.querySelector(".head-charts"), content.charts, page);
      if (content.maps.length && !page.gallery) window.drawHeadMaps(section.querySelector(".head-maps"), content.maps, page);
    }
    return page;
  }

  // What is chosen on one side is chosen on the others.
  function link(linked) {
    let telling = false;
    for (const one of linked) {
      for (const name of ["head-chosen", "token-chosen", "view-chosen"]) {
        one.events.addEventListener(name, (event) => {
          if (telling) return;
          telling = true;
          for (const other of linked) if (other !== one) other.follow(event.detail);
          telling = false;
        });
      }
    }
  }

  // A run without prompts to look at: a click in a map of heads chooses the head that charts follow.
  function followWithoutExplorer(sections, page) {
    const chart = sections.flatMap(({ content }) => content.charts).find((one) => one.layers.length);
    if (!chart) return;
    let head = { layer: chart.layers[0].layer, head: chart.heads[0] };
    page.chosen = () => ({ ...head, prompt: null, token: null });
    const tell = () => page.events.dispatchEvent(new CustomEvent("head-chosen", { detail: page.chosen() }));
    page.showHead = (layer, number) => { head = { layer, head: number }; tell(); };
    page.onReady.push(tell);
  }

  // What a button names: a group, a head, and where it has them a prompt and a token.
  function placeOf(button) {
    const place = { group: button.dataset.group, variable: button.dataset.variable };
    for (const name of ["layer", "head", "prompt", "token"]) if (name in button.dataset) place[name] = Number(button.dataset[name]);
    return place;
  }

  for (const button of document.querySelectorAll("button.open")) {
    button.hidden = !page.showHead;
    button.addEventListener("click", () => {
      const place = placeOf(button);
      page.showHead(place.layer, place.head);
      if (place.group !== undefined) page.choose(place);
    });
  }
  page.events.addEventListener("head-chosen", (event) => {
    const where = "L" + event.detail.layer + " H" + event.detail.head;
    for (const button of document.querySelectorAll("button.open")) button.title = "in place of " + where;
  });
  dark.addEventListener("change", () => shared.onTheme.forEach((change) => change()));
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
    shared.onPrint.forEach((print) => print());
  });
  // A table as text: of the clipboard with tabs, of a file with commas; numbers as the page shows them.
  function rowsOf(table) {
    return [...table.rows].map((row) => [...row.cells].filter((cell) => !cell.querySelector("button.open") && cell.matches("th, tbody td")).map((cell) => cell.textContent.trim()));
  }

  function save(text, name) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  for (const table of document.querySelectorAll("section .scroll > table:not([id])")) {
    const copy = Object.assign(document.createElement("button"), { type: "button", textContent: "copy" });
    const csv = Object.assign(document.createElement("button"), { type: "button", textContent: "CSV" });
    copy.addEventListener("click", async () => {
      const text = rowsOf(table).map((row) => row.join("\t")).join("\n");
      try { await navigator.clipboard.writeText(text); copy.textContent = "copied"; } catch { copy.textContent = "not allowed here"; }
    });
    csv.addEventListener("click", () => {
      const quoted = (cell) => (/[",\n]/.test(cell) ? '"' + cell.replaceAll('"', '""') + '"' : cell);
      save(rowsOf(table).map((row) => row.map(quoted).join(",")).join("\n") + "\n", table.caption.textContent.replace(/\W+/g, "_") + ".csv");
    });
    for (const button of [copy, csv]) button.className = "save";
    table.caption.append(" ", copy, " ", csv);
  }

  // What is drawn in a folded section has no width yet.
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => window.dispatchEvent(new Event("resize")));
  for (const link of document.querySelectorAll('a[href^="#"]')) {
    link.addEventListener("click", (event) => {
      const section = document.querySelector(link.getAttribute("href")), folded = section.querySelector(":scope > details");
      if (folded) folded.open = true;
      if (!shared.framed) return;
      event.preventDefault();
      section.scrollIntoView();
    });
  }
  document.documentElement.dataset.alive = "";
})();
