{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 30 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 30 | trimSuffix "-" }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "baton.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "baton.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "baton.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
{{- end -}}

{{- define "baton.apiKeysSecret" -}}
{{ default (printf "%s-api-keys" (include "baton.fullname" .)) .Values.apiKeys.existingSecret }}
{{- end -}}

{{- define "baton.clusterKeySecret" -}}
{{ default (printf "%s-cluster-key" (include "baton.fullname" .)) .Values.clusterKey.existingSecret }}
{{- end -}}

{{/* Empty where certificates belong to the cluster key. */}}
{{- define "baton.clusterTlsSecret" -}}
{{- if .Values.clusterTls.existingSecret -}}{{ .Values.clusterTls.existingSecret }}
{{- else if .Values.clusterTls.issuer.name -}}{{ include "baton.fullname" . }}-cluster-tls
{{- end -}}
{{- end -}}

{{- define "baton.rayTokenSecret" -}}
{{ default (printf "%s-ray-token" (include "baton.fullname" .)) .Values.rayAuth.existingSecret }}
{{- end -}}

{{/* Where Ray's head keeps its state. */}}
{{- define "baton.redisAddress" -}}
{{ default (printf "%s-valkey:6379" (include "baton.fullname" .)) .Values.gcsFaultTolerance.address }}
{{- end -}}

{{/* Empty: it has no password. */}}
{{- define "baton.redisSecret" -}}
{{- $own := ternary (printf "%s-valkey" (include "baton.fullname" .)) "" (empty .Values.gcsFaultTolerance.address) -}}
{{ default $own .Values.gcsFaultTolerance.existingSecret }}
{{- end -}}

{{/* The environment of whoever talks to Ray's dashboard. */}}
{{- define "baton.rayToken" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "baton.rayTokenSecret" . }}, key: auth_token}
{{- end -}}

{{/* What the ingresses speak. */}}
{{- define "baton.scheme" -}}
{{ ternary "https" "http" (not (empty .Values.ingressTls.existingSecret)) }}
{{- end -}}

{{/* Not empty: instances ask the Kubernetes API for their node's labels. */}}
{{- define "baton.readsNodes" -}}
{{- if and .Values.topology.enabled (eq .Values.topology.labelsOf "nodes") }}yes{{ end -}}
{{- end -}}

{{/* The label of each fact, as cluster/deploy/kube/topology.py has them. */}}
{{- define "baton.topologyLabels" -}}
{{- $usual := dict "zone" "topology.kubernetes.io/zone" "rack" "topology.kubernetes.io/rack" "nvlink_domain" "nvidia.com/gpu.clique" "nic_gbit_per_s" "baton/nic-gbit-per-s" -}}
{{- toYaml (merge (deepCopy .Values.topology.labels) $usual) -}}
{{- end -}}
