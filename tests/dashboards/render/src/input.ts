import type { DataTransformerConfig, FieldConfigSource } from '@grafana/data';

/** What the driver hands to the page: one dashboard, laid out, with the answers of a Prometheus. */
export interface Input {
  title: string;
  theme: 'dark' | 'light';
  /** Milliseconds since 1970. */
  from: number;
  to: number;
  panels: PlacedPanel[];
}

export interface PlacedPanel {
  panel: PanelModel;
  place: { x: number; y: number; width: number; height: number };
  frames: FrameInput[];
}

/** The parts of the classic panel model that are drawn. */
export interface PanelModel {
  type: string;
  title?: string;
  description?: string;
  transparent?: boolean;
  options?: Record<string, unknown>;
  fieldConfig?: FieldConfigSource;
  transformations?: DataTransformerConfig[];
}

export interface FrameInput {
  refId: string;
  fields: FieldInput[];
}

export interface FieldInput {
  name: string;
  type: 'time' | 'number' | 'string';
  labels?: Record<string, string>;
  config?: Record<string, unknown>;
  values: Array<number | string>;
}

/** What the driver asks about each panel once the page has settled. */
export interface PanelReport {
  title: string;
  type: string;
  state: 'drawn' | 'empty' | 'not drawn';
  width: number;
  height: number;
  text: string;
  titleCutOff: boolean;
  cutOff: boolean;
}

declare global {
  interface Window {
    input?: Input;
    settled?: boolean;
    report?: () => PanelReport[];
  }
}
