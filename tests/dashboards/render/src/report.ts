import type { PanelReport } from './input';

const QUIET_MILLISECONDS = 400;
/** How much higher than its letters a line of text may be, in pixels. */
const LINE_BOX = 8;

/** What each panel shows, read from the page. */
export function report(): PanelReport[] {
  return [...document.querySelectorAll<HTMLElement>('section.panel')].map((section) => {
    const content = section.querySelector<HTMLElement>('.content');
    const heading = section.querySelector<HTMLElement>('h2');
    return {
      title: section.dataset.title ?? '',
      type: section.dataset.type ?? '',
      state: (section.dataset.state ?? 'empty') as PanelReport['state'],
      width: content?.clientWidth ?? 0,
      height: content?.clientHeight ?? 0,
      text: content?.innerText ?? '',
      titleCutOff: heading !== null && heading.scrollWidth > heading.clientWidth,
      cutOff: content !== null && isCutOff(content, section.dataset.type),
    };
  });
}

/** Bars below the panel's edge, or columns of a table right of it. More rows of a table or a legend are no fault. */
function isCutOff(content: HTMLElement, type: string | undefined): boolean {
  const grid = content.querySelector('[role="grid"]');
  const edge = content.getBoundingClientRect().bottom;
  const below = (box: Element) => box.getBoundingClientRect().bottom > edge + LINE_BOX;
  const bars = type === 'bargauge' && [...content.querySelectorAll('*')].some(below);
  return bars || (grid !== null && grid.scrollWidth > grid.clientWidth);
}

/** Resolves when fonts are loaded and the page hasn't changed for a while. */
export async function quiet(): Promise<void> {
  await document.fonts.ready;
  await new Promise<void>((resolve) => {
    const later = () => window.setTimeout(() => (observer.disconnect(), resolve()), QUIET_MILLISECONDS);
    let timer = later();
    const observer = new MutationObserver(() => {
      window.clearTimeout(timer);
      timer = later();
    });
    observer.observe(document.body, { subtree: true, childList: true, attributes: true });
  });
}
