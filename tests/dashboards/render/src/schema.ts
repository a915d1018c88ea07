import type { AnnotationQuery, Dashboard, TableOptions, VariableModel } from '@grafana/schema';

/** A type as JSON writes it: an enumeration is one of its values. */
export type Plain<T> = T extends string
  ? `${T}`
  : T extends object
    ? { [Key in keyof T]: Plain<T[Key]> }
    : T;

/** What Grafana keeps in a dashboard though its schema doesn't list it. */
interface QueryVariableExtras {
  /** The query as the list of variables shows it. */
  definition?: string;
}

/** The form of a Prometheus annotation that Grafana's data source turns into a `target` when it loads it. */
interface PrometheusAnnotationExtras {
  expr?: string;
  titleFormat?: string;
  textFormat?: string;
  tagKeys?: string;
}

export type ClassicDashboard = Plain<Omit<Dashboard, 'annotations' | 'templating'>> & {
  annotations?: { list?: Array<Plain<AnnotationQuery> & PrometheusAnnotationExtras> };
  templating?: { list?: Array<Plain<VariableModel> & QueryVariableExtras> };
};

/** The footer that tables had in their options before Grafana 12.2; later ones leave it alone. */
interface TableFooter {
  show: boolean;
  reducer: string[];
  countRows?: boolean;
}

export type Table = Plain<Partial<TableOptions>> & { footer?: TableFooter };
