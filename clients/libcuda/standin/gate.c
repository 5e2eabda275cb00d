// SPDX-License-Identifier: MIT
/*
 * For tests that have to know how far the GPU is: a file named gate in CUDA_MPS_PIPE_DIRECTORY has five words of 64
 * bits, shared with the test. How many more operations may begin (all ones: any number); what the context dies
 * of (0: nothing); in which calls threads are kept (the sum of GATE_..., and in the upper half how often all were
 * released), and in which one is; how many operations have begun and not ended. Without the file nothing is held.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "standin.h"

#define LOOK_NS 1000000
#define WORDS 5

static uint64_t *gate;

void gate_find(void)
{
	char path[4200];
	struct stat info;
	int fd;

	snprintf(path, sizeof(path), "%s/gate", pipe_directory);
	fd = *pipe_directory ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (fd < 0)
		return;
	if (!fstat(fd, &info) && info.st_size >= (off_t)(WORDS * sizeof(*gate)))
		gate = mmap(NULL, WORDS * sizeof(*gate), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (gate == MAP_FAILED)
		gate = NULL;
	close(fd);
}

void gate_forget(void)
{
	if (gate)
		munmap(gate, WORDS * sizeof(*gate));
	gate = NULL;
}

static bool pass(void)
{
	uint64_t left = gate ? __atomic_load_n(gate, __ATOMIC_ACQUIRE) : UINT64_MAX;

	while (left && left != UINT64_MAX &&
	       !__atomic_compare_exchange_n(gate, &left, left - 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		;
	return left != 0;
}

void gate_ended(void)
{
	if (gate)
		__atomic_sub_fetch(gate + 4, 1, __ATOMIC_ACQ_REL);
}

/* Nobody says when the test opens the gate. */
bool gate_lets(CUcontext context)
{
	/* Before it is let: who sees that all of them are sees this one. */
	if (gate)
		__atomic_add_fetch(gate + 4, 1, __ATOMIC_ACQ_REL);
	if (context->broken || pass())
		return true;
	gate_ended();
	wait_a_moment(LOOK_NS);
	look_at(context);
	return false;
}

bool gate_wants(uint64_t what)
{
	return gate && __atomic_load_n(gate + 2, __ATOMIC_ACQUIRE) & what;
}

static uint64_t releases(void)
{
	return gate ? __atomic_load_n(gate + 2, __ATOMIC_ACQUIRE) >> 32 : 0;
}

/* A release counts for every thread that waited at that time, even if it next looks after the test keeps again. */
void gate_keep(uint64_t call)
{
	uint64_t entered = releases();

	while (gate_wants(call) && releases() == entered) {
		__atomic_store_n(gate + 3, call, __ATOMIC_RELEASE);
		usleep(LOOK_NS / 1000);
	}
}

CUresult gate_node(CUresult result)
{
	gate_keep(GATE_NODE);
	return result;
}

CUresult gate_fault(void)
{
	return gate ? (CUresult)__atomic_load_n(gate + 1, __ATOMIC_ACQUIRE) : CUDA_SUCCESS;
}
