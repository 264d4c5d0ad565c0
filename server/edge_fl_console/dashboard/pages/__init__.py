"""The pages: functions from values to markup, table rows and charts, and for each page the parts that it consists of."""
