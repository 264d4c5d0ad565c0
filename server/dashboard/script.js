// What the page does by itself: the theme, and the focus that a redrawn table would lose.
(() => {
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    for (const button of document.querySelectorAll("[data-theme-button]")) {
      button.textContent = { auto: "◐", light: "○", dark: "●" }[theme];
      button.setAttribute("aria-label", `Colours: ${theme}`);
      button.title = `Colours: ${theme}`;
    }
  };
  const stored = () => (themes.includes(localStorage.edgeFlTheme) ? localStorage.edgeFlTheme : "auto");
  show(stored());
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-button]")) return;
    localStorage.edgeFlTheme = themes[(themes.indexOf(stored()) + 1) % themes.length];
    show(localStorage.edgeFlTheme);
  });

  let focused = null;
  document.addEventListener("focusin", (event) => (focused = event.target.dataset?.key ?? null));
  document.addEventListener("pointerdown", () => (focused = null));
  new MutationObserver(() => {
    const unset = document.querySelector("[data-theme-button]:not([aria-label])");
    if (unset) show(stored());
    if (focused && (!document.activeElement || document.activeElement === document.body)) {
      document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
  }).observe(root, { childList: true, subtree: true });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      const search = document.querySelector("input[type=search]");
      if (search) (event.preventDefault(), search.focus());
    }
  });
})();
