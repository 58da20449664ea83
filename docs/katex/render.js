// Typeset what arithmatex marked, and nothing else.
addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const source = element.textContent; // \( ... \) or \[ ... \]
    katex.render(source.slice(2, -2), element, {
      displayMode: source.startsWith("\\["),
      throwOnError: false,
    });
  }
});
