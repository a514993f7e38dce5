{{- /* What every container and every pod has, as in docker/compose.yaml. */}}
{{- define "lacquer.labels" -}}
app.kubernetes.io/name: lacquer
app.kubernetes.io/instance: {{ .release.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "lacquer.metadata" -}}
name: {{ .release.Release.Name }}-{{ .component }}
labels:
  {{- include "lacquer.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .release.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .release.Release.Service }}
{{- end }}

{{- /* OnRootMismatch, not Always, which makes secrets readable to the group whenever the pod starts; they are refused then. */}}
{{- define "lacquer.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "lacquer.container" -}}
imagePullPolicy: {{ .Values.images.pullPolicy }}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
{{- end }}

{{- /* The claim of a StatefulSet: it stays when the release goes. */}}
{{- define "lacquer.claim" -}}
volumeClaimTemplates:
  - metadata:
      name: kept
    spec:
      accessModes: [{{ .accessMode }}]
      {{- with .className }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .size }}
{{- end }}
