/* SPDX-License-Identifier: MIT */
/*
 * What is remembered of an allocation in the window beside its place: an id that no other allocation of
 * this process ever has, and CU_POINTER_ATTRIBUTE_SYNC_MEMOPS. Made when it is first asked for, which
 * for most allocations is never.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* 0: out of host memory. */
uint64_t mpsd_mark_id(CUdeviceptr base);

bool mpsd_mark_sync_memops(CUdeviceptr base);

/* False: out of host memory. */
bool mpsd_mark_set_sync_memops(CUdeviceptr base, bool on);

/* It is freed. */
void mpsd_mark_forget(CUdeviceptr base);
