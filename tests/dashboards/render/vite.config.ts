import { cpSync } from 'node:fs';

import react from '@vitejs/plugin-react';
import { defineConfig, type Plugin } from 'vite';

const MODULES = 'node_modules';

/** What Grafana's components load by path from its server: icons and fonts. */
const FILES_BY_PATH: Record<string, string> = {
  '@grafana/ui/dist/public/img': 'build/img',
  '@fontsource/inter/files/inter-latin-400-normal.woff2': 'fonts/inter/Inter-Regular.woff2',
  '@fontsource/inter/files/inter-latin-500-normal.woff2': 'fonts/inter/Inter-Medium.woff2',
};

function filesByPath(): Plugin {
  let folder = '';
  return {
    name: 'files-by-path',
    apply: 'build',
    configResolved: (config) => void (folder = config.build.outDir),
    closeBundle: () =>
      Object.entries(FILES_BY_PATH).forEach(([from, to]) =>
        cpSync(`${MODULES}/${from}`, `${folder}/${to}`, { recursive: true })
      ),
  };
}

export default defineConfig({
  base: './',
  plugins: [react(), filesByPath()],
  define: { 'process.env.NODE_ENV': JSON.stringify('production') },
  build: { chunkSizeWarningLimit: 20_000, minify: false, reportCompressedSize: false },
});
