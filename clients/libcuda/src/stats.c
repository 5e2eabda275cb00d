// SPDX-License-Identifier: MIT
/* The shared statistics. They are never on the path of a launch. */
#include "stats.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proxy.h"

/* Where the kernel gives no shared memory the proxy works all the same, unseen. */
static union {
	struct mpsd_stats stats;
	char room[MPSD_STATS_BYTES];
} fallback;

struct mpsd_stats *mpsd_stats = &fallback.stats;

/* A sealed memfd cannot be shrunk under its readers. The descriptor itself is not kept. */
static void *share(void *where)
{
	int fd = memfd_create("mpsd-libcuda", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int fixed = where ? MAP_FIXED : 0;
	void *at = MAP_FAILED;

	if (fd < 0)
		return MAP_FAILED;
	if (!ftruncate(fd, MPSD_STATS_BYTES) &&
	    !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		at = mmap(where, MPSD_STATS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, fd, 0);
	close(fd);
	return at;
}

/*
 * A forked child counts for itself: it gets memory of its own at the same address. Where that
 * fails it must not write into its parent's any more.
 */
static void after_fork(void)
{
	struct mpsd_stats copy;

	memcpy(&copy, mpsd_stats, sizeof(copy));
	if (mpsd_stats == &fallback.stats || share(mpsd_stats) == MAP_FAILED)
		mpsd_stats = &fallback.stats;
	memcpy(mpsd_stats, &copy, sizeof(copy));
	mpsd_stats->pid = (uint32_t)getpid();
}

void mpsd_stats_start(void)
{
	void *shared = share(NULL);

	if (shared != MAP_FAILED)
		mpsd_stats = shared;
	mpsd_stats->version = MPSD_STATS_VERSION;
	mpsd_stats->size = sizeof(struct mpsd_stats);
	mpsd_stats->pid = (uint32_t)getpid();
	mpsd_stats->names = MPSD_NAMES;
	__atomic_store_n(&mpsd_stats->magic, MPSD_STATS_MAGIC, __ATOMIC_RELEASE);
	pthread_atfork(NULL, NULL, after_fork);
}

/*
 * Two threads that meet the same new name at the same moment may give it two places: a reader adds
 * them up. Names that do not fit are in `unmapped` alone.
 */
void mpsd_stats_unknown(const char *name)
{
	static unsigned int taken;
	unsigned int used = __atomic_load_n(&taken, __ATOMIC_ACQUIRE);

	mpsd_count(unmapped);
	for (unsigned int i = 0; i < used && i < MPSD_UNKNOWN_MAX; i++) {
		if (__atomic_load_n(&mpsd_stats->unknown[i].count, __ATOMIC_ACQUIRE) &&
		    !strncmp(mpsd_stats->unknown[i].name, name, MPSD_UNKNOWN_ROOM - 1)) {
			mpsd_count(unknown[i].count);
			return;
		}
	}
	if (used >= MPSD_UNKNOWN_MAX)
		return;
	used = __atomic_fetch_add(&taken, 1, __ATOMIC_ACQ_REL);
	if (used >= MPSD_UNKNOWN_MAX)
		return;
	strncpy(mpsd_stats->unknown[used].name, name, MPSD_UNKNOWN_ROOM - 1);
	__atomic_store_n(&mpsd_stats->unknown[used].count, 1, __ATOMIC_RELEASE);
}
