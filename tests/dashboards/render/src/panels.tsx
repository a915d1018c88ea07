import {
  applyNullInsertThreshold,
  dateTime,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
  VizOrientation,
  type DisplayValueAlignmentFactors,
  type FieldDisplay,
  type GrafanaTheme2,
  type TimeRange,
} from '@grafana/data';
import {
  BarGaugeDisplayMode,
  BarGaugeNamePlacement,
  BarGaugeValueMode,
  LegendDisplayMode,
  type TableOptions,
  type VizLegendOptions,
} from '@grafana/schema';
import {
  BarGauge,
  BigValue,
  BigValueColorMode,
  BigValueGraphMode,
  BigValueJustifyMode,
  BigValueTextMode,
  TimeSeries,
  VizRepeater,
  type VizRepeaterRenderValueProps,
} from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import type { ReactElement } from 'react';

import { isEmpty, type PanelData } from './data';
import type { Input, PanelModel } from './input';

export interface PanelProps {
  panel: PanelModel;
  data: PanelData;
  width: number;
  height: number;
  theme: GrafanaTheme2;
  range: TimeRange;
}

type Cell = VizRepeaterRenderValueProps<FieldDisplay, DisplayValueAlignmentFactors>;
type Options = Record<string, any>; // a dashboard's JSON; `make dashboards-render` checks it against @grafana/schema

export function timeRange({ from, to }: Input): TimeRange {
  const [start, end] = [dateTime(from), dateTime(to)];
  return { from: start, to: end, raw: { from: start, to: end } };
}

function displayValues({ panel, data, theme }: PanelProps, sparkline: boolean): FieldDisplay[] {
  const options = (panel.options ?? {}) as Options;
  return getFieldDisplayValues({
    fieldConfig: data.fieldConfig,
    reduceOptions: options.reduceOptions ?? { calcs: ['lastNotNull'], values: false },
    replaceVariables: (text) => text,
    theme,
    data: data.series,
    sparkline,
    timeZone: 'utc',
  });
}

function Stat(props: PanelProps): ReactElement {
  const options = (props.panel.options ?? {}) as Options;
  const graphMode: BigValueGraphMode = options.graphMode ?? BigValueGraphMode.Area;
  const draw = ({ value, width, height, alignmentFactors, count }: Cell) => (
    <BigValue
      value={value.display}
      sparkline={value.sparkline}
      count={count}
      width={width}
      height={height}
      colorMode={options.colorMode ?? BigValueColorMode.Value}
      graphMode={graphMode}
      justifyMode={options.justifyMode ?? BigValueJustifyMode.Auto}
      textMode={options.textMode ?? BigValueTextMode.Auto}
      alignmentFactors={alignmentFactors}
      text={options.text}
      disableWideLayout={options.wideLayout === false}
      theme={props.theme}
    />
  );
  return (
    <VizRepeater
      getValues={() => displayValues(props, graphMode !== BigValueGraphMode.None)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={draw}
      width={props.width}
      height={props.height}
      source={props.data}
      itemSpacing={3}
      renderCounter={0}
      autoGrid={true}
      orientation={options.orientation ?? VizOrientation.Auto}
    />
  );
}

function Bars(props: PanelProps): ReactElement {
  const options = (props.panel.options ?? {}) as Options;
  const draw = ({ value, width, height, alignmentFactors, count, orientation }: Cell) => (
    <BarGauge
      value={count === 1 && !value.field.displayName ? { ...value.display, title: undefined } : value.display}
      field={value.field}
      display={value.view?.getFieldDisplayProcessor(value.colIndex ?? 0)}
      width={width}
      height={height}
      orientation={orientation}
      text={options.text}
      theme={props.theme}
      itemSpacing={10}
      displayMode={options.displayMode ?? BarGaugeDisplayMode.Gradient}
      valueDisplayMode={options.valueMode ?? BarGaugeValueMode.Color}
      namePlacement={options.namePlacement ?? BarGaugeNamePlacement.Auto}
      showUnfilled={options.showUnfilled ?? true}
      alignmentFactors={alignmentFactors}
      isOverflow={false}
    />
  );
  return (
    <VizRepeater
      getValues={() => displayValues(props, false)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={draw}
      width={props.width}
      height={props.height}
      minVizWidth={options.minVizWidth ?? 8}
      minVizHeight={options.minVizHeight ?? 16}
      maxVizHeight={options.maxVizHeight ?? 300}
      source={props.data}
      itemSpacing={10}
      renderCounter={0}
      orientation={options.orientation ?? VizOrientation.Auto}
    />
  );
}

const LEGEND: VizLegendOptions = {
  showLegend: true,
  displayMode: LegendDisplayMode.List,
  placement: 'bottom',
  calcs: [],
};

function Lines({ panel, data, width, height, range }: PanelProps): ReactElement {
  const legend = { ...LEGEND, ...((panel.options ?? {}) as Options).legend };
  // As Grafana's panel does before it draws: the component itself fills the gaps of the first series only.
  const [refFieldPseudoMin, refFieldPseudoMax] = [range.from.valueOf(), range.to.valueOf()];
  const frames = data.series
    .filter((frame) => frame.length > 0)
    .map((frame) => applyNullInsertThreshold({ frame, refFieldPseudoMin, refFieldPseudoMax }));
  return (
    <TimeSeries
      frames={frames}
      structureRev={1}
      timeRange={range}
      timeZone="utc"
      width={width}
      height={height}
      legend={legend}
      options={panel.options}
    />
  );
}

function Rows({ panel, data, width, height, range }: PanelProps): ReactElement {
  const options = (panel.options ?? {}) as unknown as Partial<TableOptions>;
  return (
    <TableNG
      data={data.series[options.frameIndex ?? 0] ?? data.series[0]!}
      width={width}
      height={height}
      noHeader={options.showHeader === false}
      showTypeIcons={options.showTypeIcons}
      initialSortBy={options.sortBy}
      cellHeight={options.cellHeight}
      fieldConfig={data.fieldConfig}
      timeRange={range}
      structureRev={1}
    />
  );
}

/** Grafana's `PanelDataErrorView`: its text for a panel without data, in the middle. */
function Empty({ data }: PanelProps): ReactElement {
  return <div className="note">{data.fieldConfig.defaults.noValue ?? 'No data'}</div>;
}

function NotDrawn({ panel, data }: PanelProps): ReactElement {
  const count = data.series.filter((frame) => frame.length > 0).length;
  return (
    <div className="note">
      {panel.type}: {count} series, tested by query only. @grafana/ui doesn't export this visualisation.
    </div>
  );
}

const DRAWN: Record<string, (props: PanelProps) => ReactElement> = {
  stat: Stat,
  bargauge: Bars,
  timeseries: Lines,
  table: Rows,
};
/** These show a text of their own where there is no value. */
const HAVE_NO_VALUE_TEXT = ['stat', 'bargauge'];

export function state({ type }: PanelModel, data: PanelData): 'drawn' | 'empty' | 'not drawn' {
  if (isEmpty(data.series)) {
    return 'empty';
  }
  return type in DRAWN ? 'drawn' : 'not drawn';
}

export function Visualisation(props: PanelProps): ReactElement {
  const Drawn = DRAWN[props.panel.type] ?? NotDrawn;
  if (isEmpty(props.data.series) && !HAVE_NO_VALUE_TEXT.includes(props.panel.type)) {
    return <Empty {...props} />;
  }
  return <Drawn {...props} />;
}
