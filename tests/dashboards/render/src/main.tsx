import { createTheme, ThemeContext } from '@grafana/data';
import { GlobalStyles } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

import { DashboardPage } from './DashboardPage';
import { panelData } from './data';
import type { Input } from './input';
import { quiet, report } from './report';

const STYLE = `
  body { margin: 0; }
  .heading { display: flex; align-items: center; }
  .note { display: flex; height: 100%; align-items: center; justify-content: center; text-align: center; }
`;

async function draw(input: Input): Promise<void> {
  const theme = createTheme({ colors: { mode: input.theme } });
  document.body.style.background = theme.colors.background.canvas;
  const data = await Promise.all(input.panels.map((placed) => panelData(placed, theme)));
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <style>{STYLE}</style>
      <DashboardPage input={input} data={data} theme={theme} />
    </ThemeContext.Provider>
  );
  await quiet();
}

window.report = report;
if (!window.input) {
  throw new Error('window.input is missing: the driver (dashboards/render/pictures.py) sets it');
}
draw(window.input).finally(() => {
  window.settled = true;
});
