// The explorer of a page: the modules of the live one with the answers that the run holds. What is chosen is told to the other sections.
window.reportSections.positions = window.reportSections.attention_rows = function (section, data, page) {
  const root = section.querySelector(".explorer"), places = data.prompts.map((prompt) => prompt.prompt);
  const asked = page.addressed && /^#(%7B|\{)/i.test(location.hash);
  let before = {};
  const chosenOf = ({ heads, number, token, count, view }) => ({ layer: heads[0][0], head: heads[0][1], heads, prompt: number, token, count, view });
  const explored = explore(root, new StoredSource(data, page.charts, page.headMaps), page.addressed && !page.framed, (state) => {
    const now = chosenOf(state);
    page.chosen = () => now;
    if (same(now, before)) return;
    before = now;
    page.events.dispatchEvent(new Event("chosen"));
  });
  page.explores = true;
  page.ready = explored.ready;
  page.showHead = (layer, head) => {
    explored.choose([layer, head]);
    root.scrollIntoView();
  };
  // Show what is chosen elsewhere, as far as this run has it.
  page.follow = async (wanted) => {
    const state = explored.state(), place = places.indexOf(wanted.prompt), now = page.chosen();
    const heads = (wanted.heads || [[wanted.layer, wanted.head]]).filter(([layer, head]) => data.layers.some((one) => one.layer === layer) && data.heads.includes(head));
    if (place >= 0 && place !== state.prompt) await explored.restart({ prompt: place, heads: state.heads });
    const changes = {};
    if (heads.length && !same(heads, state.heads)) changes.heads = heads;
    if (wanted.token !== undefined && wanted.token !== now.token) changes.token = Math.min(wanted.token, data.prompts[explored.state().prompt].count - 1);
    if (wanted.view !== undefined && !same(wanted.view, now.view)) changes.view = wanted.view;
    if (Object.keys(changes).length) await explored.update(changes);
  };
  // Show what a finding names: its prompt, head and token, and its group's map.
  page.choose = async ({ group, variable, ...place }) => {
    await page.follow(place);
    const map = page.headMaps.find((one) => one.group === group && one.variable === variable) || page.headMaps.find((one) => one.group === group);
    if (map) explored.arrange({ score: map.title, of: place.prompt === undefined ? "mean" : "chosen" });
  };
  root.hidden = false;
  page.onReady.push(() => {
    if (asked) root.scrollIntoView();
    else if (page.opening) page.choose(page.opening);
  });
};
