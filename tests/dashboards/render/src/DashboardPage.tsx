import type { GrafanaTheme2 } from '@grafana/data';
import { ErrorBoundaryAlert, PanelChrome } from '@grafana/ui';
import type { CSSProperties, ReactElement } from 'react';

import type { PanelData } from './data';
import type { Input, PlacedPanel } from './input';
import { state, timeRange, Visualisation } from './panels';

/** Grafana's grid: 24 columns, cells of 30 px, 8 px between panels. */
const COLUMNS = 24;
const CELL = 30;
const GAP = 8;
const HEAD = 48;

interface Props {
  input: Input;
  data: PanelData[];
  theme: GrafanaTheme2;
}

export function DashboardPage({ input, data, theme }: Props): ReactElement {
  const bottom = Math.max(0, ...input.panels.map(({ place }) => place.y + place.height));
  return (
    <main style={{ position: 'relative', height: HEAD + bottom * (CELL + GAP) + GAP }}>
      <h1 style={{ ...theme.typography.h3, padding: '12px 8px', height: HEAD }}>{input.title}</h1>
      {input.panels.map((placed, number) => (
        <Cell key={number} placed={placed} data={data[number]!} input={input} theme={theme} />
      ))}
    </main>
  );
}

function Cell({ placed, data, input, theme }: { placed: PlacedPanel; data: PanelData; input: Input; theme: GrafanaTheme2 }) {
  const { panel, place } = placed;
  const box = rectangle(place);
  if (panel.type === 'row') {
    return (
      <h2 className="heading" style={{ ...box, ...theme.typography.h5 }}>
        {panel.title}
      </h2>
    );
  }
  return (
    <section className="panel" style={box} data-title={panel.title} data-type={panel.type} data-state={state(panel, data)}>
      <PanelChrome title={panel.title} description={panel.description} width={box.width} height={box.height}>
        {(width, height) => (
          <ErrorBoundaryAlert>
            <div className="content" style={{ width, height }}>
              <Visualisation
                panel={panel}
                data={data}
                width={width}
                height={height}
                theme={theme}
                range={timeRange(input)}
              />
            </div>
          </ErrorBoundaryAlert>
        )}
      </PanelChrome>
    </section>
  );
}

function rectangle({ x, y, width, height }: PlacedPanel['place']) {
  const column = (window.innerWidth - GAP) / COLUMNS;
  return {
    position: 'absolute',
    left: GAP + x * column,
    top: HEAD + y * (CELL + GAP),
    width: width * column - GAP,
    height: height * (CELL + GAP) - GAP,
  } satisfies CSSProperties;
}
