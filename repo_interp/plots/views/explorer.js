// The explorer of a page: the modules of the live one with the answers that the run holds. What is chosen is told to the other sections.
window.reportSections.positions = window.reportSections.attention_rows = function (section, data, page) {
  const root = section.querySelector(".explorer");
  const asked = page.addressed && /^#(%7B|\{)/i.test(location.hash);
  page.source = new StoredSource(data, page.charts, page.headMaps);
  const explored = explore(root, page.source, { addressed: page.addressed && !page.framed });
  explored.events.addEventListener("chosen", () => {
    page.chosen = explored.chosen;
    page.events.dispatchEvent(new Event("chosen"));
  });
  page.explores = true;
  page.ready = explored.ready;
  page.showHead = (layer, head) => {
    explored.choose([layer, head]);
    root.scrollIntoView();
  };
  page.follow = explored.follow;
  // Show what a finding names: its prompt, head and token, and its group's map.
  page.choose = async ({ group, variable, looksAt, ...place }, colored = true) => {
    const telling = place.token === undefined && place.layer !== undefined && page.source.telling([place.layer, place.head], looksAt, place.prompt === undefined ? null : [place.prompt]);
    await page.follow({ ...place, ...telling });
    const map = page.headMaps.find((one) => one.group === group && one.variable === variable) || page.headMaps.find((one) => one.group === group);
    if (map && colored) explored.arrange({ score: map.title, of: place.prompt === undefined ? "mean" : "chosen" });
  };
  root.hidden = false;
  page.onReady.push(() => {
    if (asked) root.scrollIntoView();
    else if (page.opening) page.choose(page.opening, !page.source.named);
  });
};
