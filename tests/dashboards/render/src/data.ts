import {
  applyFieldOverrides,
  cacheFieldDisplayNames,
  createDataFrame,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
  type DataFrame,
  type DataTransformerInfo,
  type FieldConfigSource,
  type FieldType,
  type GrafanaTheme2,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';

import { completed, registry } from './fieldOptions';
import type { FrameInput, PlacedPanel } from './input';

// One transformer is listed twice, under its old and its new name.
const TRANSFORMERS = new Map(Object.values(standardTransformers).map((each) => [each.id, each]));
standardTransformersRegistry.setInit(() =>
  [...TRANSFORMERS.values()].map((transformation) => ({
    id: transformation.id,
    name: transformation.name,
    transformation: transformation as DataTransformerInfo,
    editor: () => null,
    imageDark: '',
    imageLight: '',
  }))
);

export interface PanelData {
  series: DataFrame[];
  fieldConfig: FieldConfigSource;
}

/** A panel's frames as its visualisation gets them in Grafana: transformed, with the field configuration applied. */
export async function panelData({ panel, frames }: PlacedPanel, theme: GrafanaTheme2): Promise<PanelData> {
  const transformed = await lastValueFrom(
    transformDataFrame(panel.transformations ?? [], frames.map(dataFrame), { interpolate: (text) => text })
  );
  const fieldConfig = completed(panel.type, panel.fieldConfig);
  const series = applyFieldOverrides({
    data: transformed,
    fieldConfig,
    fieldConfigRegistry: registry(customKeys(fieldConfig)),
    replaceVariables: (text) => text,
    theme,
    timeZone: 'utc',
  });
  cacheFieldDisplayNames(series);
  return { series, fieldConfig };
}

function dataFrame(frame: FrameInput): DataFrame {
  return createDataFrame({
    refId: frame.refId,
    fields: frame.fields.map((field) => ({ ...field, type: field.type as FieldType })),
  });
}

function customKeys({ defaults, overrides }: FieldConfigSource): string[] {
  const overridden = overrides.flatMap((override) => override.properties.map(({ id }) => id));
  const own = overridden.filter((id) => id.startsWith('custom.')).map((id) => id.slice('custom.'.length));
  return [...new Set([...Object.keys(defaults.custom ?? {}), ...own])];
}

/** No frame has a value: a panel without data. */
export const isEmpty = (series: DataFrame[]): boolean => series.every((frame) => frame.length === 0);
