{{- define "baton.clusterSpec" -}}
{{- $head := mergeOverwrite (.Files.Get "files/defaults.json" | fromJson).head (deepCopy .Values.head) -}}
rayVersion: {{ .Chart.Annotations.rayVersion | quote }}
authOptions:
  mode: token
  secretName: {{ include "baton.rayTokenSecret" . }}
enableInTreeAutoscaling: {{ .Values.autoscaling.enabled }}
{{- if .Values.autoscaling.enabled }}
autoscalerOptions:
  version: v2
  upscalingMode: Default
  idleTimeoutSeconds: {{ .Values.autoscaling.idleTimeoutSeconds }}
  {{- with .Values.autoscaling.resources }}
  resources: {{ toJson . }}
  {{- end }}
{{- end }}
{{- with .Values.gcsFaultTolerance }}
{{- if .enabled }}
gcsFaultToleranceOptions:
  redisAddress: {{ include "baton.redisAddress" $ }}
  {{- with .username }}
  redisUsername: {value: {{ . | quote }}}
  {{- end }}
  {{- with include "baton.redisSecret" $ }}
  redisPassword: {valueFrom: {secretKeyRef: {name: {{ . }}, key: redis-password}}}
  {{- end }}
{{- end }}
{{- end }}
headGroupSpec:
  serviceType: ClusterIP
  rayStartParams:
    {{- toYaml (mergeOverwrite (include "baton.rayStart" (dict) | fromYaml) (dict "num-cpus" "0" "dashboard-host" "0.0.0.0") $head.rayStartParams) | nindent 4 }}
  template:
    {{- include "baton.pod" (dict "root" . "kind" "head" "pod" $head) | nindent 4 }}
workerGroupSpecs:
{{- range $model := include "baton.models" . | fromJsonArray }}
  {{- /* Room for an ingress, the pod's share of the schedulers, and the next version of each beside it while Serve rolls one out. */}}
  {{- $pods := max 1 $model.ingressReplicas | int }}
  {{- $schedulers := div (add ($model.effective.serve.schedulers | int) (sub $pods 1)) $pods }}
  {{- $resources := dict (printf "%singress" $model.prefix) (mul 2 (add 1 $schedulers) | int) }}
  {{- include "baton.group" (dict "root" $ "kind" "ingress" "pod" $model.values.ingress "model" $model "resources" $resources "replicas" $model.ingressReplicas) }}
  {{- range $role, $pool := $model.groups }}
  {{- $resources := dict $pool.resource $pool.offered }}
  {{- if $pool.shares }}{{- $_ := set $resources $model.pools.prefill.resource $model.pools.prefill.offered }}{{- end }}
  {{- include "baton.group" (dict "root" $ "kind" $role "pod" (index $model.values $role) "model" $model "pool" $pool "resources" $resources "replicas" $pool.replicas) }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.group" }}
- groupName: {{ .model.prefix }}{{ .kind }}
  replicas: {{ int .replicas }}
  minReplicas: {{ ternary .replicas .pod.minReplicas (kindIs "invalid" .pod.minReplicas) | int }}
  maxReplicas: {{ ternary .replicas .pod.maxReplicas (kindIs "invalid" .pod.maxReplicas) | int }}
  rayStartParams:
    {{- toYaml (mergeOverwrite (include "baton.rayStart" . | fromYaml) .pod.rayStartParams) | nindent 4 }}
  template:
    {{- include "baton.pod" . | nindent 4 }}
{{- end -}}

{{/* KubeRay puts these on a shell's command line: the resources are quoted for the shell and for JSON. */}}
{{- define "baton.rayStart" -}}
object-store-memory: {{ include "baton.objectStoreBytes" . | quote }}
{{- if and .pool .pod.gpuDeviceClass }}
num-gpus: {{ .pool.podGpus | quote }}
{{- end }}
{{- with .resources }}
resources: {{ toJson . | toJson | squote }}
{{- end }}
{{- end -}}
