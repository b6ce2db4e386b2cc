// The atlas as a table of heads: a click on a row opens the head in the explorer, and the row of the head that is chosen is marked.
window.reportSections.atlas = function (section, data, page) {
  const place = section.querySelector(".head-table");
  const mark = headTable(place, { ...data, open: ([layer, head]) => { if (page.showHead) page.showHead(layer, head); } });
  page.events.addEventListener("chosen", () => mark([[page.chosen().layer, page.chosen().head]]));
  place.hidden = false;
};
