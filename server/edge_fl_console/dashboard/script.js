// Colour scheme, remembered by the browser; "/" as shortcut to the search field; focus kept on buttons that a table draws again;
// filters that are folded on a phone; buttons that copy.
(() => {
  const signs = { auto: "◐", light: "○", dark: "●" };
  const themes = Object.keys(signs);
  const root = document.documentElement;
  root.lang = "en";
  const stored = () => (localStorage.edgeFlTheme in signs ? localStorage.edgeFlTheme : "auto");
  const show = () => {
    const theme = stored();
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    const button = document.querySelector("[data-theme-button]");
    if (!button || button.title === `Colours: ${theme}`) return;
    button.textContent = signs[theme];
    button.title = `Colours: ${theme}`;
    button.setAttribute("aria-label", button.title);
  };
  show();
  let focused = null;
  document.addEventListener("focusin", (event) => (focused = event.target.dataset?.key ?? null));
  document.addEventListener("pointerdown", () => (focused = null));
  new MutationObserver(() => {
    show();
    for (const area of document.querySelectorAll(".q-table__middle.scroll, .padded")) {
      if (area.scrollWidth <= area.clientWidth) area.removeAttribute("tabindex");
      else if (area.tabIndex < 0) area.tabIndex = 0; // scrolls with the keyboard
    }
    if (focused && document.activeElement === document.body) {
      document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
  }).observe(root, { childList: true, subtree: true });
  const copied = async (code) => {
    getSelection().selectAllChildren(code); // stays if nothing else works
    try {
      await navigator.clipboard.writeText(code.textContent); // with HTTPS and on loopback only
      return true;
    } catch {
      return document.execCommand("copy");
    }
  };
  document.addEventListener("click", async (event) => {
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      const done = await copied(copy.parentElement.querySelector("code"));
      const label = copy.querySelector("span");
      label.textContent = done ? "Copied" : "Selected: press Ctrl+C";
      setTimeout(() => (label.textContent = "Copy"), done ? 2000 : 8000);
    }
    const fold = event.target.closest("[data-fold]");
    if (fold) fold.setAttribute("aria-expanded", fold.getAttribute("aria-expanded") !== "true");
    if (!event.target.closest("[data-theme-button]")) return;
    localStorage.edgeFlTheme = themes[(themes.indexOf(stored()) + 1) % themes.length];
    show();
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    const search = document.querySelector("input[type=search]");
    if (event.key === "/" && search && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      search.focus();
    }
  });
})();
