// SPDX-License-Identifier: MIT
/*
 * mpsd-run executes the program in its own place, so only the proxy can say at the end why the program failed. No call
 * into the driver is made here, and a program that ends well is left alone.
 */
#include "failover/lost.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "failover/carry.h"

static atomic_int error;	/* the first one; 0: none */
static atomic_llong seen_at;	/* seconds since the epoch */
static pid_t owner;

static void at_end(int status, void *unused)
{
	time_t at = (time_t)atomic_load(&seen_at);
	char line[160], clock[16] = "";
	struct tm local;

	(void)unused;
	if (!status || !atomic_load(&error) || getpid() != owner)
		return;
	if (localtime_r(&at, &local))
		strftime(clock, sizeof(clock), "%H:%M:%S", &local);
	snprintf(line, sizeof(line),
		 "mpsd: the GPU work of this program was lost at %s (CUDA error %d); for the cause, run: mpsd-ctl faults\n",
		 clock, atomic_load(&error));
	/* A program without standard error hears nothing. */
	if (write(STDERR_FILENO, line, strlen(line)) < 0)
		return;
}

void mpsd_lost_watch(void)
{
	owner = getpid();
	on_exit(at_end, NULL);
}

void mpsd_lost_note(CUresult result)
{
	int none = 0;

	/* A failed assertion of the program's own kernel reaches no other program and is not recorded. */
	if (!mpsd_is_loss(result) || result == CUDA_ERROR_ASSERT)
		return;
	if (atomic_compare_exchange_strong(&error, &none, (int)result))
		atomic_store(&seen_at, (long long)time(NULL));
}
