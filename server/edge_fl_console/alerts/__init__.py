"""Alerts: rules over the registry, and their delivery to mail, webhooks, MQTT and other services; docs/alerts.md."""
