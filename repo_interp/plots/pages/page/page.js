// Brings every section to life with the data beside it: its interactive part by its own script, then its charts of the chosen head and its
// map of heads. Sections that stand side by side, one per run, each have a page object of their own; what is chosen in one is chosen in
// the others. Knows the colours of the page, light and dark.
import { colourOf, config, layout } from "./charts.js";
import { ink, inflated } from "./dom.js";
import { drawHeadCharts } from "./head_charts.js";
import { link } from "./link.js";
import { MAP, headMap } from "./map.js";

(async function () {
  // The policy of the page lets an inline script run, and no eval.
  if (window.packedPlotly) document.head.append(Object.assign(document.createElement("script"), { textContent: await inflated(window.packedPlotly) }));

  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  const shared = {
    config: config("chart"),
    layout: (given) => layout(document.body, given),
    colour: (name) => colourOf(document.documentElement, name),
    ink,
    // Whether the page stands in a frame of a notebook, which has no address.
    framed: location.protocol === "about:",
    // What is called when colours change, before printing, and when all sections stand.
    onTheme: [],
    onPrint: [],
    onReady: [],
  };

  // What the sections of one run share.
  const pageOfRun = (addressed) => Object.assign(Object.create(shared), {
    // Tells "chosen"; `chosen()` says what: layer, head, prompt, token, count and view.
    events: new EventTarget(),
    // Whether the address of the page says what is chosen here.
    addressed,
    // Maps of heads and charts of all sections, whether the explorer draws every head, so that no section needs a map
    // of its own, and a promise of its first answer.
    headMaps: [],
    charts: [],
    explores: false,
    ready: null,
    // Set by the explorer, where the run says what its prompts are.
    showHead: null,
    source: null,
    chosen: null,
    follow: null,
    // Chooses what it is given of a group's map, prompt, head and token.
    choose: () => {},
  });

  const all = await Promise.all([...document.querySelectorAll("script.section-data")].map(async (script) => ({
    name: script.dataset.section, section: script.closest("section"),
    content: JSON.parse(script.type === "application/json" ? script.textContent : await inflated(script.textContent)),
  })));
  const sides = all.filter(({ section }) => section.dataset.side !== undefined);
  const page = bringToLife(all.filter(({ section }) => section.dataset.side === undefined), pageOfRun(true));
  const pages = sides.map((side, place) => bringToLife([side], pageOfRun(place === 0)));
  await Promise.all([page, ...pages].map((one) => one.ready));
  await link(pages.filter((one) => one.follow));
  const first = document.querySelector("#findings button.open");
  if (first) page.opening = placeOf(first);
  shared.onReady.forEach((ready) => ready());

  function bringToLife(sections, page) {
    for (const { name, content } of sections) {
      page.headMaps.push(...content.maps.map((map) => ({ ...map, group: name })));
      page.charts.push(...content.charts);
    }
    for (const { name, section, content } of sections) {
      const draw = window.reportSections[name];
      if (draw && content.data !== null) draw(section, content.data, page);
    }
    if (!page.showHead) followWithoutExplorer(page);
    for (const { section, content } of sections) {
      const own = content.charts.filter((chart) => !["rows", "next"].includes(chart.kind)); // these are the explorer's
      if (own.length) drawHeadCharts(section.querySelector(".head-charts"), own, page);
      if (content.maps.length && !page.explores) drawMaps(section.querySelector(".head-maps"), content.maps, page);
    }
    return page;
  }

  // A run without prompts to look at: a click in a map of heads chooses the head that charts follow.
  function followWithoutExplorer(page) {
    const chart = page.charts.find((one) => one.layers.length);
    if (!chart) return;
    const choose = (layer, head) => {
      page.chosen = () => ({ layer, head, prompt: null, token: null });
      page.events.dispatchEvent(new Event("chosen"));
    };
    page.showHead = choose;
    page.onReady.push(() => choose(chart.layers[0].layer, chart.heads[0]));
  }

  // The maps of a section of a page without an explorer.
  function drawMaps(place, maps, page) {
    let settings = { ...MAP, score: maps[0].title };
    const redraw = () => drawMap({ maps, outlines: null, prompt: null }, settings, page.chosen ? [[page.chosen().layer, page.chosen().head]] : [], [colourOf(place, "--mark")]);
    const drawMap = headMap(place, { layers: maps[0].layers, heads: maps[0].heads, open: ([layer, head]) => { if (page.showHead) page.showHead(layer, head); }, changed: (changes) => { settings = { ...settings, ...changes }; redraw(); } });
    place.hidden = false;
    page.events.addEventListener("chosen", redraw);
    page.onTheme.push(redraw);
    redraw();
  }

  // What a button names: a group, a head, and where it has them a prompt and a token.
  function placeOf(button) {
    const place = { group: button.dataset.group, variable: button.dataset.variable, looksAt: button.dataset.looksAt };
    for (const name of ["layer", "head", "prompt", "token"]) if (name in button.dataset) place[name] = Number(button.dataset[name]);
    return place;
  }

  for (const button of document.querySelectorAll("button.open[data-layer]")) {
    button.hidden = !page.showHead;
    button.addEventListener("click", () => {
      const place = placeOf(button);
      page.showHead(place.layer, place.head);
      if (place.group !== undefined) page.choose(place);
    });
  }
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

  for (const table of document.querySelectorAll("section .scroll > table:not(.explorer *, .head-table *)")) {
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
