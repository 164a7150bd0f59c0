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
  # KubeRay adds this container itself.
  securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
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
{{- range include "baton.groups" . | fromJsonArray }}
  {{- include "baton.group" (merge (dict "root" $) .) }}
{{- end }}
{{- end -}}

{{/* Every worker group of every model, as a JSON list: kind, pod, model, resources, replicas, size (pods of one instance) and, of pools, pool. */}}
{{- define "baton.groups" -}}
{{- $groups := list -}}
{{- range $model := include "baton.models" . | fromJsonArray -}}
  {{- /* Room for an ingress, the pod's share of the schedulers, and the next version of each beside it while Serve rolls one out. */ -}}
  {{- $pods := max 1 $model.ingressReplicas | int -}}
  {{- $others := int $model.onIngress.others -}}
  {{- range $model.fleets -}}{{- $others = add $others (int .onIngress.others) -}}{{- end -}}
  {{- $share := div (add $others (sub $pods 1)) $pods -}}
  {{- $resources := dict (printf "%singress" $model.prefix) (mul 2 (add 1 $share) | int) -}}
  {{- $groups = append $groups (dict "kind" "ingress" "pod" $model.values.ingress "model" (omit $model "fleets") "resources" $resources "replicas" $model.ingressReplicas "size" 1) -}}
  {{- range $model := prepend $model.fleets $model -}}
  {{- range $role, $pool := $model.groups -}}
    {{- $resources := dict $pool.resource $pool.offered -}}
    {{- if $pool.shares -}}{{- $_ := set $resources $model.pools.prefill.resource $model.pools.prefill.offered -}}{{- end -}}
    {{- $groups = append $groups (dict "kind" $role "pod" (index $model.values $role) "model" (omit $model "fleets") "pool" $pool "resources" $resources "replicas" $pool.replicas "size" $pool.podsEach) -}}
  {{- end -}}
  {{- end -}}
{{- end -}}
{{- toJson $groups -}}
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

{{/* What KubeRay would put together: how a pod of a LeaderWorkerSet starts Ray. */}}
{{- define "baton.rayCommand" -}}
{{- $params := include "baton.rayStart" . | fromYaml -}}
{{- if eq .kind "head" -}}
  {{- $params = mergeOverwrite $params (dict "port" "6379" "num-cpus" "0" "dashboard-host" "0.0.0.0") -}}
  {{- if .root.Values.gcsFaultTolerance.enabled -}}
    {{- with .root.Values.gcsFaultTolerance.username }}{{ $_ := set $params "redis-username" (quote .) }}{{ end -}}
    {{- with include "baton.redisSecret" .root }}{{ $_ := set $params "redis-password" "\"$REDIS_PASSWORD\"" }}{{ end -}}
  {{- end -}}
{{- else -}}
  {{- $_ := set $params "address" (printf "%s-head-svc:6379" (include "baton.fullname" .root)) -}}
  {{- with .pool }}{{ $_ := set $params "num-gpus" (.podGpus | toString) }}{{ end -}}
{{- end -}}
{{- $params = mergeOverwrite $params .pod.rayStartParams -}}
ulimit -n 65536 2>/dev/null; exec ray start{{ if eq .kind "head" }} --head{{ end }} --block --metrics-export-port=8080 --dashboard-agent-listen-port=52365
{{- range $name, $value := $params }} --{{ $name }}={{ $value }}{{ end }}
{{- end -}}
