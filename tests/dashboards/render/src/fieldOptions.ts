import {
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  FieldColorModeId,
  identityOverrideProcessor,
  numberOverrideProcessor,
  PanelPlugin,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  ThresholdsMode,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
  type FieldConfig,
  type FieldConfigOptionsRegistry,
  type FieldConfigPropertyItem,
  type FieldConfigSource,
  type FieldOverrideContext,
  type ThresholdsConfig,
} from '@grafana/data';
import { GraphDrawStyle, LineInterpolation, StackingMode, VisibilityMode, type GraphFieldConfig } from '@grafana/schema';

// Grafana's server application registers these options with their editors; drawing needs only how they are applied.
type Process = (value: never, context: FieldOverrideContext, settings?: never) => unknown;
const STANDARD: Record<string, Process> = {
  unit: unitOverrideProcessor,
  min: numberOverrideProcessor,
  max: numberOverrideProcessor,
  decimals: numberOverrideProcessor,
  displayName: displayNameOverrideProcessor,
  color: identityOverrideProcessor,
  noValue: identityOverrideProcessor,
  links: dataLinksOverrideProcessor,
  mappings: valueMappingsOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
};

/** What Grafana's panels set where a dashboard says nothing. */
const TIME_SERIES: FieldConfig<GraphFieldConfig> = {
  color: { mode: FieldColorModeId.PaletteClassic },
  custom: {
    drawStyle: GraphDrawStyle.Line,
    lineInterpolation: LineInterpolation.Linear,
    lineWidth: 1,
    fillOpacity: 0,
    showPoints: VisibilityMode.Auto,
    pointSize: 5,
    stacking: { mode: StackingMode.None, group: 'A' },
    barAlignment: 0,
    barWidthFactor: 0.6,
    spanNulls: false,
  },
};
const OTHERS: FieldConfig = {
  color: { mode: FieldColorModeId.Thresholds },
};
const THRESHOLDS: ThresholdsConfig = {
  mode: ThresholdsMode.Absolute,
  steps: [
    { value: Number.NEGATIVE_INFINITY, color: 'green' },
    { value: 80, color: 'red' },
  ],
};

/** A field configuration as Grafana completes it when it loads a dashboard. */
export function completed(type: string, given: FieldConfigSource | undefined): FieldConfigSource {
  const base = type === 'timeseries' ? TIME_SERIES : OTHERS;
  const { custom, ...defaults } = given?.defaults ?? {};
  return {
    defaults: { thresholds: THRESHOLDS, ...base, ...defaults, custom: { ...base.custom, ...custom } },
    overrides: given?.overrides ?? [],
  };
}

const noEditor = () => null;

function property(id: string, process: Process): FieldConfigPropertyItem {
  return {
    id,
    path: id,
    name: id,
    editor: noEditor,
    override: noEditor,
    process: process as FieldConfigPropertyItem['process'],
    shouldApply: () => true,
    getItemsCount: () => 0,
  };
}

standardEditorsRegistry.setInit(() => []);
standardFieldConfigEditorRegistry.setInit(() =>
  Object.entries(STANDARD).map(([id, process]) => property(id, process))
);

/** The options that a panel's field configuration may set: Grafana's standard ones, and these of its own. */
export function registry(customKeys: string[]): FieldConfigOptionsRegistry {
  const plugin = new PanelPlugin(noEditor).useFieldConfig({
    useCustomConfig: (builder) => {
      customKeys.forEach((key) => builder.addCustomEditor(property(key, identityOverrideProcessor)));
    },
  });
  return plugin.fieldConfigRegistry;
}
