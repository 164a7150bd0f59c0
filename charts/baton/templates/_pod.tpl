{{/*
The pod template of every group. `kind`: head, ingress, prefill or decode; `pod`: the group's values; `model`: none for the
head; `pool`: of prefill and decode only.
*/}}
{{- define "baton.pod" -}}
{{- $root := .root -}}
metadata:
  labels:
    {{- include "baton.podLabels" . | nindent 4 }}
    {{- with .pod.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .pod.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.fullname" $root }}{{ if .pool }}-instances{{ end }}
  automountServiceAccountToken: {{ or (and .pool (include "baton.readsNodes" $root)) (and (eq .kind "head") $root.Values.autoscaling.enabled) | empty | not }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (include "baton.drainSeconds" $root | int) 30 }}
  securityContext:
    {{- toYaml (mergeOverwrite (include "baton.podSecurity" . | fromYaml) (deepCopy .pod.podSecurityContext)) | nindent 4 }}
  {{- include "baton.pullSecrets" $root | nindent 2 }}
  {{- if and .pool .pod.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- include "baton.placement" (dict "placement" .pod "labels" (include "baton.podLabels" . | fromYaml)) | nindent 2 }}
  {{- with include "baton.claims" . | fromJsonArray }}
  resourceClaims: {{ toJson . }}
  {{- end }}
  {{- $fetched := and .model $root.Values.modelCache.fetch.enabled }}
  {{- $joins := and .model (eq $root.Values.kind "LeaderWorkerSet") }}
  {{- if or .pod.initContainers $fetched $joins (and .pool $root.Values.preflight.initContainers) }}
  initContainers:
    {{- if $joins }}
    {{- include "baton.headContainer" . | nindent 4 }}
    {{- end }}
    {{- if $fetched }}
    {{- include "baton.waitContainer" . | nindent 4 }}
    {{- end }}
    {{- if and .pool $root.Values.preflight.initContainers }}
    {{- include "baton.doctorContainer" . | nindent 4 }}
    {{- end }}
    {{- with .pod.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray
      {{- include "baton.container" . | nindent 6 }}
      {{- if eq $root.Values.kind "LeaderWorkerSet" }}
      command: [sh, -c, {{ include "baton.rayCommand" . | toJson }}]
      {{- end }}
      ports:
        {{- include "baton.ports" . | nindent 8 }}
      {{- include "baton.probes" . | nindent 6 }}
      lifecycle:
        {{- if and .pool .pool.shares }}
        postStart:
          exec:
            command: [sh, -c, mkdir -p $CUDA_MPS_PIPE_DIRECTORY && nvidia-cuda-mps-control -d]
        {{- end }}
        preStop:
          exec:
            command: [python, -m, cluster.deploy.kube.prestop, --timeout-s, {{ include "baton.drainSeconds" $root | quote }}]
  volumes:
    {{- include "baton.volumes" . | nindent 4 }}
{{- end -}}

{{- define "baton.podLabels" -}}
{{ include "baton.selector" .root }}
baton/role: {{ .kind }}
{{- if .model }}
baton/model: {{ toYaml .model.label }}
{{- end }}
{{- end -}}

{{/* Which nodes a pod may be on. `labels` are those of the pods that it is spread among. */}}
{{- define "baton.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with index $.placement $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- $default := list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway") }}
topologySpreadConstraints:
  {{- range default $default .placement.topologySpread }}
  - {{ merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $.labels)) | toJson }}
  {{- end }}
{{- end -}}

{{/* What the chart's small pods have in common: those that run no part of Ray. `component` names them. */}}
{{- define "baton.smallPodLabels" -}}
{{ include "baton.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
# A volume of weights has its owner already: looking at each of its files would take minutes.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if and .pool .pod.rdma }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* Image, rights, environment, mounts and resources: also of the init container that checks the same node. */}}
{{- define "baton.container" -}}
image: {{ include "baton.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml (mergeOverwrite (include "baton.containerSecurity" . | fromYaml) (deepCopy .pod.securityContext)) | nindent 2 }}
env:
  {{- include "baton.env" . | nindent 2 }}
{{- with .pod.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "baton.mounts" . | nindent 2 }}
resources:
  {{- include "baton.resources" . | nindent 2 }}
{{- end -}}

{{/*
Where models are on a volume of their own, the rest of the disk is bounded, too. A pod that downloads them keeps them among its
ephemeral storage, and nobody knows how large they are.
*/}}
{{- define "baton.resources" -}}
{{- $resources := deepCopy (default (dict) .pod.resources) -}}
{{- $scratch := dict "ephemeral-storage" .pod.scratchSize -}}
{{- $devices := dict -}}
{{- if .pool -}}
  {{- $devices = deepCopy (default (dict) .pod.rdma) -}}
  {{- if and .pool.podGpus (not .pod.gpuDeviceClass) -}}{{- $_ := set $devices .pod.gpuResource (int .pool.podGpus) -}}{{- end -}}
{{- end -}}
{{- $claims := list -}}
{{- range include "baton.claims" . | fromJsonArray -}}{{- $claims = append $claims (dict "name" .name) -}}{{- end -}}
{{- if $claims -}}{{- $_ := set $resources "claims" $claims -}}{{- end -}}
{{- range $part := list "limits" "requests" -}}
  {{- $disk := ternary (dict) $scratch (and (eq $part "limits") (not $.root.Values.modelCache.enabled)) -}}
  {{- $made := mergeOverwrite (deepCopy $disk) (default (dict) (index $resources $part)) $devices -}}
  {{- if $made -}}{{- $_ := set $resources $part $made -}}{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The claims of a pod, as a JSON list: GPUs, an IMEX channel, and what the values add. */}}
{{- define "baton.claims" -}}
{{- $claims := list -}}
{{- if .pool -}}
  {{- if .pod.gpuDeviceClass -}}
    {{- $claims = append $claims (dict "name" "gpus" "resourceClaimTemplateName" (printf "%s-%s-gpus" .model.fullname .kind)) -}}
  {{- end -}}
  {{- if .pod.imex -}}
    {{- $claims = append $claims (dict "name" "imex" "resourceClaimTemplateName" (printf "%s-imex" .model.fullname)) -}}
  {{- end -}}
  {{- $claims = concat $claims .pod.resourceClaims -}}
{{- end -}}
{{- toJson $claims -}}
{{- end -}}

{{- define "baton.env" -}}
- {name: OMP_NUM_THREADS, value: "1"}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
- {name: RAY_worker_niceness, value: "0"}
# Ray keeps so much of what each process logs, and one file from before.
- {name: RAY_ROTATION_MAX_BYTES, value: "67108864"}
- {name: RAY_ROTATION_BACKUP_COUNT, value: "1"}
- name: BATON_CLUSTER_KEY
  valueFrom:
    secretKeyRef: {name: {{ include "baton.clusterKeySecret" .root }}, key: cluster-key}
{{- include "baton.hubEnv" .root | nindent 0 }}
{{- if .root.Values.modelCache.fetch.enabled }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if and .pool .root.Values.topology.enabled }}
{{- if include "baton.readsNodes" .root }}
- name: BATON_KUBE_NODE
  valueFrom:
    fieldRef: {fieldPath: spec.nodeName}
{{- else }}
{{- range $fact, $label := include "baton.topologyLabels" .root | fromYaml }}
- name: BATON_KUBE_POD_{{ upper $fact }}
  valueFrom:
    fieldRef: {fieldPath: "metadata.labels['{{ $label }}']"}
{{- end }}
{{- end }}
{{- with .root.Values.topology.labels }}
- {name: BATON_KUBE_LABELS, value: {{ toJson . | quote }}}
{{- end }}
{{- end }}
{{- if .pool }}
- {name: BATON_SERVING_FOLDER, value: /tmp/baton-serving}
- {name: BATON_KUBE_INSTANCES, value: {{ mul .pool.perPod (ternary 2 1 .pool.shares) | quote }}}
{{- end }}
{{- if and .pool .pool.shares }}
- {name: CUDA_MPS_PIPE_DIRECTORY, value: /tmp/nvidia-mps}
- {name: CUDA_MPS_LOG_DIRECTORY, value: /tmp/nvidia-mps}
{{- end }}
{{- if eq .root.Values.kind "LeaderWorkerSet" }}
{{ include "baton.rayToken" .root }}
{{- if .root.Values.gcsFaultTolerance.enabled }}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
{{- if eq .kind "head" }}
- {name: RAY_REDIS_ADDRESS, value: {{ include "baton.redisAddress" .root }}}
- {name: RAY_external_storage_namespace, value: {{ include "baton.fullname" .root }}}
{{- with include "baton.redisSecret" .root }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: redis-password}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- with .pod.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where models are, and who may have them. */}}
{{- define "baton.hubEnv" -}}
- {name: HF_HOME, value: /models}
{{- with .Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: token}
{{- end }}
{{- end -}}

{{- define "baton.modelsClaim" -}}
{{ default (printf "%s-models" (include "baton.fullname" .)) .Values.modelCache.existingClaim }}
{{- end -}}

{{- define "baton.mounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: models, mountPath: /models}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/baton}
{{- if eq .kind "ingress" }}
{{- if .root.Values.files.enabled }}
- {name: files, mountPath: /files}
{{- end }}
{{- if .root.Values.store.existingSecret }}
- {name: store, mountPath: /etc/baton/store, readOnly: true}
{{- end }}
{{- if .root.Values.apiKeys.enabled }}
- {name: api-keys, mountPath: /etc/baton/api-keys, readOnly: true}
{{- end }}
{{- if .root.Values.ingressTls.existingSecret }}
- {name: ingress-tls, mountPath: /etc/baton/ingress-tls, readOnly: true}
{{- end }}
{{- if .root.Values.live }}
- {name: live, mountPath: /etc/baton/live, readOnly: true}
{{- end }}
{{- end }}
{{- if .model }}
- {name: config, mountPath: /etc/baton/config, readOnly: true}
{{- end }}
{{- if and .model (include "baton.clusterTlsSecret" .root) }}
- {name: cluster-tls, mountPath: /etc/baton/cluster-tls, readOnly: true}
{{- end }}
{{- if and (eq .kind "head") (ne .root.Values.kind "RayService") }}
- {name: serve-config, mountPath: /etc/baton/serve, readOnly: true}
{{- end }}
{{- with .pod.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    {{- with include "baton.shmSize" . }}
    sizeLimit: {{ quote . }}
    {{- end }}
- name: models
  {{- if .root.Values.modelCache.enabled }}
  persistentVolumeClaim: {claimName: {{ include "baton.modelsClaim" .root }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- range list "tmp" "home" }}
- name: {{ . }}
  emptyDir: {sizeLimit: {{ $.pod.scratchSize | quote }}}
{{- end }}
{{- if eq .kind "ingress" }}
{{- if .root.Values.files.enabled }}
- name: files
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-files" (include "baton.fullname" .root)) .root.Values.files.existingClaim }}
{{- end }}
{{- with .root.Values.store.existingSecret }}
- name: store
  secret:
    secretName: {{ . }}
    items: [{key: url, path: url}]
{{- end }}
{{- if .root.Values.apiKeys.enabled }}
- name: api-keys
  secret:
    secretName: {{ include "baton.apiKeysSecret" .root }}
    items: [{key: api-keys, path: api-keys}]
{{- end }}
{{- with .root.Values.ingressTls.existingSecret }}
- name: ingress-tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- if .root.Values.live }}
- name: live
  configMap: {name: {{ include "baton.fullname" .root }}-live}
{{- end }}
{{- end }}
{{- if .model }}
- name: config
  configMap: {name: {{ include "baton.fullname" .root }}-config}
{{- end }}
{{- if .model }}
{{- with include "baton.clusterTlsSecret" .root }}
- name: cluster-tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- end }}
{{- if and (eq .kind "head") (ne .root.Values.kind "RayService") }}
- name: serve-config
  configMap: {name: {{ include "baton.fullname" .root }}-serve}
{{- end }}
{{- with .pod.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Empty where pools take what the pod's memory limit leaves them. */}}
{{- define "baton.shmSize" -}}
{{- if not .pool -}}{{ add (include "baton.objectStoreBytes" . | int64) 1073741824 }}
{{- else if not (kindIs "invalid" .pod.shmSize) -}}{{ .pod.shmSize }}
{{- else if gt (.model.effective.engine.num_blocks | int64) 0 -}}
{{- fail (printf "%s: engine.num_blocks hides how large the KV pool is: say so with %s.shmSize" .model.name .kind) -}}
{{- else if gt (.model.effective.engine.kv_bytes | int64) 0 -}}{{ .pool.shmBytes }}
{{- end -}}
{{- end -}}

{{- define "baton.ports" -}}
{{- if eq .kind "head" }}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: 8265}
- {name: client, containerPort: 10001}
{{- end }}
{{- if eq .kind "ingress" }}
- {name: http, containerPort: {{ int .model.effective.serve.port }}}
{{- end }}
- {name: metrics, containerPort: 8080}
{{- end -}}

{{/*
Alive: the node's raylet answers. Ready: an ingress would have a request answered now; an instance of a prefill or decode pod
computes, and has said so within 10 s (cluster/deploy/kube/serving_mark.py); the head is part of the cluster.
*/}}
{{- define "baton.probes" -}}
{{- $alive := dict "path" "/api/healthz" "port" 52365 -}}
startupProbe:
  httpGet: {{ toJson $alive }}
  periodSeconds: 5
  failureThreshold: 120
livenessProbe:
  httpGet: {{ toJson $alive }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  {{- if eq .kind "ingress" }}
  httpGet: {path: /ready, port: http, scheme: {{ include "baton.scheme" .root | upper }}}
  periodSeconds: 2
  failureThreshold: 1
  {{- else if .pool }}
  exec:
    command: [sh, -c, 'test -n "$(find "$BATON_SERVING_FOLDER" -type f -newermt "-10 seconds" -print -quit)"']
  periodSeconds: 5
  failureThreshold: 2
  {{- else }}
  httpGet: {{ toJson $alive }}
  periodSeconds: 10
  {{- end }}
  timeoutSeconds: 5
{{- end -}}
