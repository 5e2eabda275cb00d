// SPDX-License-Identifier: MIT
/* Copies of two and three dimensions, and memsets of two, as operations: saved, kept, given to the driver. */
#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "exact/undo.h"

/*
 * Rows that are less than a page apart leave no whole page out. Of others only their own pages are saved: what lies
 * between may be as large as the GPU's memory, and need not be mapped.
 */
static CUresult save_plane(struct mpsd_plan *plan, CUdeviceptr at, size_t pitch, size_t width, size_t rows)
{
	CUresult result = CUDA_SUCCESS;

	if (rows == 1 || pitch < width + MPSD_EXACT_PAGE)
		return mpsd_undo_save(plan, at, (rows - 1) * pitch + width);
	for (size_t row = 0; row < rows && result == CUDA_SUCCESS; row++)
		result = mpsd_undo_save(plan, at + row * pitch, width);
	return result;
}

static CUresult save_copy(const struct mpsd_op *op, struct mpsd_plan *plan)
{
	const struct mpsd_rows *rows = op->copy.rows;
	CUresult result = CUDA_SUCCESS;

	for (size_t plane = 0; plane < rows->given.Depth && result == CUDA_SUCCESS; plane++)
		result = save_plane(plan, op->copy.to + plane * rows->to_plane, rows->to_pitch,
				    rows->given.WidthInBytes, rows->given.Height);
	return result;
}

CUresult mpsd_rows_save(const struct mpsd_op *op, struct mpsd_plan *plan)
{
	size_t width;

	if (op->kind == MPSD_OP_COPY)
		return op->copy.rows ? save_copy(op, plan) : mpsd_undo_save(plan, op->copy.to, op->copy.size);
	width = op->set.width * op->set.count;
	return op->set.has_rows ? save_plane(plan, op->set.to, op->set.pitch, width, op->set.rows)
			    : mpsd_undo_save(plan, op->set.to, width);
}

bool mpsd_copy_keep(struct mpsd_op *op)
{
	const struct mpsd_rows *rows = op->copy.rows;
	const char *from = (const char *)op->copy.from;
	char *kept = malloc(op->copy.size), *to = kept;

	if (!kept)
		return false;
	if (!rows)
		memcpy(to, from, op->copy.size);
	for (size_t plane = 0; rows && plane < rows->given.Depth; plane++) {
		for (size_t row = 0; row < rows->given.Height; row++) {
			memcpy(to, from + plane * rows->from_plane + row * rows->from_pitch,
			       rows->given.WidthInBytes);
			to += rows->given.WidthInBytes;
		}
	}
	op->copy.kept = kept;
	return true;
}

CUDA_MEMCPY3D mpsd_rows_native(const struct mpsd_op *op)
{
	CUDA_MEMCPY3D given = op->copy.rows->given;

	given.dstDevice += mpsd_address(op->copy.to) - op->copy.to;
	given.srcDevice += mpsd_address(op->copy.from) - op->copy.from;
	if (op->copy.kept) {
		given.srcMemoryType = CU_MEMORYTYPE_HOST;
		given.srcHost = op->copy.kept;
		given.srcXInBytes = given.srcY = given.srcZ = 0;
		given.srcPitch = given.WidthInBytes;
		given.srcHeight = given.Height;
	}
	return given;
}

static CUDA_MEMCPY2D plane_of(const CUDA_MEMCPY3D *given)
{
	return (CUDA_MEMCPY2D){
		.srcXInBytes = given->srcXInBytes, .srcY = given->srcY, .srcMemoryType = given->srcMemoryType,
		.srcHost = given->srcHost, .srcDevice = given->srcDevice, .srcArray = given->srcArray,
		.srcPitch = given->srcPitch,
		.dstXInBytes = given->dstXInBytes, .dstY = given->dstY, .dstMemoryType = given->dstMemoryType,
		.dstHost = given->dstHost, .dstDevice = given->dstDevice, .dstArray = given->dstArray,
		.dstPitch = given->dstPitch,
		.WidthInBytes = given->WidthInBytes, .Height = given->Height,
	};
}

static CUresult set_now(const struct mpsd_op *op, CUdeviceptr to)
{
	size_t pitch = op->set.pitch, count = op->set.count, rows = op->set.rows;
	uint32_t value = op->set.value;

	switch (op->set.width) {
	case 1:
		return inner_cuMemsetD2D8_v2(to, pitch, (unsigned char)value, count, rows);
	case 2:
		return inner_cuMemsetD2D16_v2(to, pitch, (unsigned short)value, count, rows);
	default:
		return inner_cuMemsetD2D32_v2(to, pitch, value, count, rows);
	}
}

static CUresult set(const struct mpsd_op *op, CUdeviceptr to, CUstream stream)
{
	size_t pitch = op->set.pitch, count = op->set.count, rows = op->set.rows;
	uint32_t value = op->set.value;

	switch (op->set.width) {
	case 1:
		return inner_cuMemsetD2D8Async(to, pitch, (unsigned char)value, count, rows, stream);
	case 2:
		return inner_cuMemsetD2D16Async(to, pitch, (unsigned short)value, count, rows, stream);
	default:
		return inner_cuMemsetD2D32Async(to, pitch, value, count, rows, stream);
	}
}

CUresult mpsd_rows_issue_now(const struct mpsd_op *op)
{
	CUDA_MEMCPY3D given;
	CUDA_MEMCPY2D plane;

	if (op->kind == MPSD_OP_SET)
		return set_now(op, mpsd_address(op->set.to));
	given = mpsd_rows_native(op);
	if (op->copy.rows->is_3d)
		return inner_cuMemcpy3D_v2(&given);
	plane = plane_of(&given);
	return op->copy.rows->is_unaligned ? inner_cuMemcpy2DUnaligned_v2(&plane) : inner_cuMemcpy2D_v2(&plane);
}

CUresult mpsd_rows_issue(const struct mpsd_op *op, CUstream stream)
{
	CUDA_MEMCPY3D given;
	CUDA_MEMCPY2D plane;

	if (op->kind == MPSD_OP_SET)
		return set(op, mpsd_address(op->set.to), stream);
	given = mpsd_rows_native(op);
	if (op->copy.rows->is_3d)
		return inner_cuMemcpy3DAsync_v2(&given, stream);
	plane = plane_of(&given);
	return inner_cuMemcpy2DAsync_v2(&plane, stream);
}
