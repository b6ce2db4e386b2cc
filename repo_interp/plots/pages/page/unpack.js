// Unpacks and runs plotly.js; `plotlyReady` is fulfilled when it has run. The policy of the page lets an inline script run, and no eval.
"use strict";

window.plotlyReady = (async function () {
  const bytes = Uint8Array.from(atob("PACKED"), (character) => character.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
})();
