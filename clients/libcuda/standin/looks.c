// SPDX-License-Identifier: MIT
/* Whether the context has died of others' doing, and waits until somebody says so. */
#include <time.h>

#include "standin.h"

/* A GPU whose server was killed still wrote for up to 2.4 ms (measured). */
#define LOOK_NS 2000000

void add_nanoseconds(struct timespec *time, uint64_t nanoseconds)
{
	nanoseconds += (uint64_t)time->tv_nsec;
	time->tv_sec += (time_t)(nanoseconds / 1000000000);
	time->tv_nsec = (long)(nanoseconds % 1000000000);
}

void look_at(CUcontext context)
{
	CUresult deadly = context->broken ? CUDA_SUCCESS : gate_fault();

	if (!context->broken && deadly == CUDA_SUCCESS)
		deadly = backend->look();

	if (deadly != CUDA_SUCCESS)
		kill_context(context, deadly);
}

void look_sometimes(CUcontext context)
{
	static struct timespec next;
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	if (now.tv_sec < next.tv_sec || (now.tv_sec == next.tv_sec && now.tv_nsec < next.tv_nsec))
		return;
	next = now;
	add_nanoseconds(&next, LOOK_NS);
	look_at(context);
}

void wait_a_moment(uint64_t nanoseconds)
{
	struct timespec soon;

	clock_gettime(CLOCK_MONOTONIC, &soon);
	add_nanoseconds(&soon, nanoseconds);
	pthread_cond_clockwait(&gpu_changed, &gpu_lock, CLOCK_MONOTONIC, &soon);
}

/* Until somebody says what the context died of. */
void await_news(CUcontext context)
{
	while (!context->broken && backend->is_halted()) {
		wait_a_moment(LOOK_NS);
		look_at(context);
	}
}

bool may_begin(CUcontext context, const struct operation *operation)
{
	while (!context->broken && !operation->always && !backend->begin())
		await_news(context);
	return !context->broken || operation->always;
}

void wait_for_news(CUcontext context)
{
	wait_a_moment(LOOK_NS);
	look_sometimes(context);
}
