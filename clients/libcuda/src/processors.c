// SPDX-License-Identifier: MIT
#include "processors.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#define ROOM 4096

/* What stands there first; false: there is no such file, or nothing that is a number. */
static bool read_from(const char *folder, const char *name, long long *one, long long *two)
{
	char path[ROOM + 32];
	FILE *file;
	int found;

	if (snprintf(path, sizeof(path), "%s/%s", folder, name) >= (int)sizeof(path))
		return false;
	file = fopen(path, "re");
	if (!file)
		return false;
	found = fscanf(file, "%lld %lld", one, two);
	fclose(file);
	return found > 0;
}

/* Microseconds of processors in so many of time: "max" is any number, and -1 of version 1. */
static bool is_limited(const char *folder)
{
	long long quota, period = 0, unused;

	if (read_from(folder, "cpu.max", &quota, &period))
		return quota < 2 * period;
	return read_from(folder, "cpu.cfs_quota_us", &quota, &unused) && quota >= 0 &&
	       read_from(folder, "cpu.cfs_period_us", &period, &unused) && quota < 2 * period;
}

/* The group and all that it is in: in a container the uppermost one that is seen is the container's. */
static bool is_limited_in(const char *root, const char *group)
{
	char folder[ROOM];
	char *end;

	if (snprintf(folder, sizeof(folder), "%s%s", root, group) >= (int)sizeof(folder))
		return false;
	while (!is_limited(folder)) {
		end = strrchr(folder, '/');
		if (!end || (size_t)(end - folder) < strlen(root))
			return false;
		*end = 0;
	}
	return true;
}

/* `list`: between commas, up to a colon. */
static bool has_item(const char *list, const char *item)
{
	size_t length = strlen(item);

	while (strncmp(list, item, length) || (list[length] != ',' && list[length] != ':')) {
		list += strcspn(list, ",:");
		if (*list++ != ',')
			return false;
	}
	return true;
}

static bool is_limited_by(const char *line, const char *root)
{
	const char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
	char under[ROOM];

	if (!group)
		return false;
	if (group == names + 1)
		return is_limited_in(root, group + 1);
	/* Version 1: its controllers, "cpu", "cpu,cpuacct" or the other way round. */
	if (!has_item(names + 1, "cpu"))
		return false;
	return snprintf(under, sizeof(under), "%s/cpu", root) < (int)sizeof(under) && is_limited_in(under, group + 1);
}

bool mpsd_processors_are_several(const char *groups, const char *root)
{
	bool limited = false;
	char line[ROOM];
	cpu_set_t allowed;
	FILE *file;

	/* More processors than such a set has room for are several. */
	if (!sched_getaffinity(0, sizeof(allowed), &allowed) && CPU_COUNT(&allowed) < 2)
		return false;
	file = fopen(groups, "re");
	while (file && !limited && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		limited = is_limited_by(line, root);
	}
	if (file)
		fclose(file);
	return !limited;
}
