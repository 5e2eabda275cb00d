// SPDX-License-Identifier: MIT
#include "failover/maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "window.h"

#define LINE 4352	/* a path, and what stands before it */

bool mpsd_maps_is(const char *path)
{
	char own[32];

	if (!path || strncmp(path, "/proc/", 6) != 0)
		return false;
	snprintf(own, sizeof(own), "/proc/%d/maps", (int)getpid());
	return !strcmp(path, "/proc/self/maps") || !strcmp(path, own);
}

static bool is_hidden(const char *line)
{
	unsigned long long from, to;

	return sscanf(line, "%llx-%llx", &from, &to) == 2 && mpsd_window_covers(from, to - from);
}

int mpsd_maps_open(void)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	int fd = memfd_create("maps", MFD_CLOEXEC);
	bool is = maps && fd >= 0, begins = true, hidden = false;
	char line[LINE];

	while (is && fgets(line, sizeof(line), maps)) {
		size_t size = strlen(line);

		if (begins)
			hidden = is_hidden(line);
		begins = line[size - 1] == '\n';
		is = hidden || write(fd, line, size) == (ssize_t)size;
	}
	if (maps)
		fclose(maps);
	if (is && lseek(fd, 0, SEEK_SET) == 0)
		return fd;
	if (fd >= 0)
		close(fd);
	errno = ENOMEM;
	return -1;
}
