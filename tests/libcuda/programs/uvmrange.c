// SPDX-License-Identifier: MIT
/*
 * uvmrange.c on two character devices with the expected name, in FOLDER/wrong and FOLDER/right. The first refuses
 * every mmap, as the descriptor that pins memory does; the second accepts any. The kernel's mappings are then read
 * from /proc/self/maps. Prints "ok".
 */
#include "uvmrange.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checking.h"

#define GRANULE ((size_t)2 << 20)

void *mpsd_real_handle;		/* none: so there is no stand-in */

/* Whether one mapping, or adjacent ones, with these permissions cover exactly this range. */
static bool has(uint64_t base, size_t size, const char *permissions)
{
	FILE *file = fopen("/proc/self/maps", "re");
	unsigned long start, end;
	uint64_t at = base;
	char line[512], found[8];

	while (at < base + size && fgets(line, sizeof(line), file)) {
		CHECK(sscanf(line, "%lx-%lx %7s", &start, &end, found) == 3);
		if (end <= at)
			continue;
		if (start > at || strcmp(found, permissions))
			break;
		at = end;
	}
	fclose(file);
	return at >= base + size;
}

static int device(const char *folder, const char *which)
{
	char path[256];
	int fd;

	snprintf(path, sizeof(path), "%s/%s/nvidia-uvm", folder, which);
	fd = open(path, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	return fd;
}

static bool is_in_child(uint64_t base)
{
	int status, child = fork();

	if (!child)
		_exit(msync((void *)base, 4096, MS_ASYNC) == 0);
	CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
	return WEXITSTATUS(status);
}

int main(int count, char **given)
{
	uint64_t base = (uint64_t)mmap(NULL, 8 * GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	const uint8_t gpu[16] = { 1 };
	int fd;

	CHECK(count == 2 && base != (uint64_t)MAP_FAILED);
	/* Without a descriptor nothing is mapped or changed. */
	CHECK(!mpsd_range_manage(base, GRANULE) && !mpsd_range_manage_null());
	device(given[1], "wrong");
	CHECK(!mpsd_range_manage(base, GRANULE) && has(base, 8 * GRANULE, "---p"));
	fd = device(given[1], "right");
	CHECK(mpsd_range_manage(base + GRANULE, 2 * GRANULE));
	CHECK(has(base, GRANULE, "---p") && has(base + GRANULE, 2 * GRANULE, "---s"));
	CHECK(has(base + 3 * GRANULE, 5 * GRANULE, "---p"));
	/* A child inherits the reservation, but not the zone. */
	CHECK(is_in_child(base) && !is_in_child(base + GRANULE));
	CHECK(mpsd_range_free(base + GRANULE, 2 * GRANULE, true) && has(base, 8 * GRANULE, "---p"));
	/* This driver refuses the ioctls. */
	CHECK(!mpsd_range_sparse(base, GRANULE, gpu) && has(base, 8 * GRANULE, "---p"));
	/* The descriptor has moved, and its old number refers to another file. */
	CHECK(dup2(fd, fd + 10) == fd + 10 && dup2(device(given[1], "wrong"), fd) == fd);
	CHECK(mpsd_range_manage(base, GRANULE) && has(base, GRANULE, "---s"));
	if (mpsd_range_manage_null()) {
		CHECK(has(0, MPSD_RANGE_NULL_PAGE, "---s"));
		/* Not over an existing mapping. */
		CHECK(!mpsd_range_manage_null() && has(0, MPSD_RANGE_NULL_PAGE, "---s"));
		CHECK(mpsd_range_free(0, MPSD_RANGE_NULL_PAGE, true) && !has(0, 4096, "---s"));
	}
	/* The device is gone: a failure leaves the range unchanged. */
	close(fd + 10);
	CHECK(!mpsd_range_manage(base + GRANULE, GRANULE) && has(base + GRANULE, 7 * GRANULE, "---p"));
	puts("ok");
	return 0;
}
