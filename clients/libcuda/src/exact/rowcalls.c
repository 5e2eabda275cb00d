// SPDX-License-Identifier: MIT
/*
 * The program's copies of two and three dimensions and its memsets of two: as operations in mode `exact`
 * (work_NAME()), and with the addresses of the copy in use without it (make_NAME()).
 */
#include <stdlib.h>

#include "exact/state.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "memory.h"

/* One side of a copy: what the program gave of it, and where its first byte is. */
struct side {
	CUmemorytype type;
	CUdeviceptr base, at;
	size_t x, y, z, pitch, height;
	size_t plane;
};

static struct side target_of(const CUDA_MEMCPY3D *given)
{
	bool is_host = given->dstMemoryType == CU_MEMORYTYPE_HOST;

	return (struct side){
		.type = given->dstMemoryType, .base = is_host ? (CUdeviceptr)given->dstHost : given->dstDevice,
		.x = given->dstXInBytes, .y = given->dstY, .z = given->dstZ, .pitch = given->dstPitch,
		.height = given->dstHeight,
	};
}

static struct side source_of(const CUDA_MEMCPY3D *given)
{
	bool is_host = given->srcMemoryType == CU_MEMORYTYPE_HOST;

	return (struct side){
		.type = given->srcMemoryType, .base = is_host ? (CUdeviceptr)given->srcHost : given->srcDevice,
		.x = given->srcXInBytes, .y = given->srcY, .z = given->srcZ, .pitch = given->srcPitch,
		.height = given->srcHeight,
	};
}

/* sum += count * step. False: that is no address. */
static bool add(size_t *sum, size_t count, size_t step)
{
	size_t more;

	return !__builtin_mul_overflow(count, step, &more) && !__builtin_add_overflow(*sum, more, sum);
}

/* False: no driver could copy it. Without a pitch rows lie one behind the other, as planes do without a height. */
static bool measure(struct side *side, const CUDA_MEMCPY3D *given)
{
	size_t at = side->base, end, height = side->height ? side->height : given->Height;
	bool is_known = side->type == CU_MEMORYTYPE_HOST || side->type == CU_MEMORYTYPE_DEVICE ||
			side->type == CU_MEMORYTYPE_UNIFIED;

	side->pitch = side->pitch ? side->pitch : given->WidthInBytes;
	if (!is_known || __builtin_mul_overflow(side->pitch, height, &side->plane) || !add(&at, 1, side->x) ||
	    !add(&at, side->y, side->pitch) || !add(&at, side->z, side->plane))
		return false;
	side->at = end = at;
	return add(&end, given->Depth - 1, side->plane) && add(&end, given->Height - 1, side->pitch) &&
	       add(&end, 1, given->WidthInBytes);
}

/* Where it lies is in the operation then. */
static bool understand(struct mpsd_op *op, struct mpsd_rows *rows)
{
	const CUDA_MEMCPY3D *given = &rows->given;
	struct side to = target_of(given), from = source_of(given);

	op->copy.rows = rows;
	if (!given->WidthInBytes || !given->Height || !given->Depth ||
	    !measure(&to, given) || !measure(&from, given) ||
	    __builtin_mul_overflow(given->WidthInBytes, given->Height, &op->copy.size) ||
	    __builtin_mul_overflow(op->copy.size, given->Depth, &op->copy.size))
		return false;
	op->copy.to = to.at;
	op->copy.from = from.at;
	rows->to_pitch = to.pitch;
	rows->to_plane = to.plane;
	rows->from_pitch = from.pitch;
	rows->from_plane = from.plane;
	rows->to_span = (given->Depth - 1) * to.plane + (given->Height - 1) * to.pitch + given->WidthInBytes;
	rows->from_span = (given->Depth - 1) * from.plane + (given->Height - 1) * from.pitch + given->WidthInBytes;
	if (to.type != CU_MEMORYTYPE_HOST)
		mpsd_written(to.at);
	return true;
}

/* cuda.h: what a driver does not refuse. Of the rest nothing is done here that it would not have done. */
static bool is_plain(const struct side *side, const CUDA_MEMCPY3D *given)
{
	size_t width = given->WidthInBytes;

	return side->base && (side->pitch ? side->pitch >= width && side->pitch - width >= side->x : !side->x) &&
	       (given->Depth == 1 || (side->height >= side->y && side->height - side->y >= given->Height)) &&
	       !(side->type == CU_MEMORYTYPE_HOST && mpsd_is_device(side->base));
}

/* What the call names it is not always: the GPU's addresses are of one space with the host's. */
static bool is_host(const struct side *side, CUdeviceptr at)
{
	return !mpsd_is_device(at) && (side->type != CU_MEMORYTYPE_DEVICE || mpsd_is_pinned((const void *)at));
}

static void find_way(struct mpsd_op *op, const struct side *to, const struct side *from)
{
	bool is_in = is_host(from, op->copy.from);

	op->copy.is_from_host = is_in;
	op->copy.is_for_host = is_host(to, op->copy.to);
	op->copy.way = op->copy.is_for_host ? is_in ? MPSD_COPY_ANY : MPSD_COPY_OUT
					    : is_in ? MPSD_COPY_IN : MPSD_COPY_WITHIN;
}

static CUresult submit(struct mpsd_op *op, const struct mpsd_rows *rows)
{
	struct side to = target_of(&rows->given), from = source_of(&rows->given);
	bool is_good, is_in, is_pinned, is_awaited;

	find_way(op, &to, &from);
	is_in = op->copy.is_from_host;
	is_pinned = is_in && mpsd_is_pinned((const void *)op->copy.from);
	is_good = is_plain(&to, &rows->given) && is_plain(&from, &rows->given) && !rows->given.srcLOD &&
		  !rows->given.dstLOD && !rows->given.reserved0 && !rows->given.reserved1;
	is_awaited = op->copy.is_for_host && (op->waits || !mpsd_is_pinned((const void *)op->copy.to));
	/* What something before it will have put into pinned memory by then the GPU reads itself. */
	if (is_in && is_good && !is_pinned && op->copy.size <= MPSD_MOST_KEPT && !mpsd_hosts_are_open()) {
		if (!mpsd_copy_keep(op))
			return CUDA_ERROR_OUT_OF_MEMORY;
		return mpsd_submit_new(op, is_awaited || op->waits);
	}
	op->copy.is_borrowed = is_in;
	/* By pieces, of which none may have been copied when the driver refuses another. */
	if (is_awaited && !is_in && is_good && !mpsd_capturing())
		return mpsd_bounds_refuse(op->copy.from, rows->from_span) ? CUDA_ERROR_INVALID_VALUE
									    : mpsd_stage_rows_out(op);
	return mpsd_submit_new(op, is_awaited || (is_in && (!is_pinned || op->waits)));
}

/* The driver's own answer; in another copy the handle of an array would lead astray. */
static CUresult copy_of_array(const struct mpsd_op *op)
{
	mpsd_line_opaque("a 2D or 3D copy with a CUDA array");
	return mpsd_tables()->moves ? CUDA_ERROR_NOT_SUPPORTED : mpsd_answered(mpsd_op_issue(op));
}

/* `is_noted`: as an operation. */
static CUresult copy(const CUDA_MEMCPY3D *given, bool is_3d, bool is_unaligned, CUstream stream, bool waits,
		     bool is_noted)
{
	struct mpsd_rows rows = { .given = *given, .is_3d = is_3d, .is_unaligned = is_unaligned };
	struct mpsd_op op = { .kind = MPSD_OP_COPY, .waits = waits, .stream = stream, .copy = { .rows = &rows } };

	if (given->srcMemoryType == CU_MEMORYTYPE_ARRAY || given->dstMemoryType == CU_MEMORYTYPE_ARRAY)
		return copy_of_array(&op);
	/* What is not understood the driver refuses, or there is nothing to be copied. */
	return understand(&op, &rows) && is_noted ? submit(&op, &rows) : mpsd_op_issue(&op);
}

static CUresult copy_plane(const CUDA_MEMCPY2D *given, bool is_unaligned, CUstream stream, bool waits, bool is_noted)
{
	const CUDA_MEMCPY3D box = {
		.srcXInBytes = given->srcXInBytes, .srcY = given->srcY, .srcMemoryType = given->srcMemoryType,
		.srcHost = given->srcHost, .srcDevice = given->srcDevice, .srcArray = given->srcArray,
		.srcPitch = given->srcPitch,
		.dstXInBytes = given->dstXInBytes, .dstY = given->dstY, .dstMemoryType = given->dstMemoryType,
		.dstHost = given->dstHost, .dstDevice = given->dstDevice, .dstArray = given->dstArray,
		.dstPitch = given->dstPitch,
		.WidthInBytes = given->WidthInBytes, .Height = given->Height, .Depth = 1,
	};

	return copy(&box, false, is_unaligned, stream, waits, is_noted);
}

#define PLANE_NOW(prefix, function, is_unaligned, is_noted)					\
	CUresult prefix##_##function(const CUDA_MEMCPY2D *pCopy)				\
	{											\
		if (!pCopy)									\
			return inner_##function(pCopy);						\
		return copy_plane(pCopy, is_unaligned, CU_STREAM_LEGACY, true, is_noted);	\
	}

PLANE_NOW(make, cuMemcpy2D_v2, false, false)
PLANE_NOW(work, cuMemcpy2D_v2, false, true)
PLANE_NOW(make, cuMemcpy2DUnaligned_v2, true, false)
PLANE_NOW(work, cuMemcpy2DUnaligned_v2, true, true)

static CUresult plane_async(const CUDA_MEMCPY2D *given, CUstream stream, bool is_noted)
{
	if (!given)
		return inner_cuMemcpy2DAsync_v2(given, mpsd_native(stream));
	return copy_plane(given, false, stream, false, is_noted);
}

CUresult make_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream)
{
	return plane_async(pCopy, hStream, false);
}

CUresult work_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream)
{
	return plane_async(pCopy, hStream, true);
}

static CUresult box_now(const CUDA_MEMCPY3D *given, bool is_noted)
{
	return given ? copy(given, true, false, CU_STREAM_LEGACY, true, is_noted) : inner_cuMemcpy3D_v2(given);
}

CUresult make_cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy)
{
	return box_now(pCopy, false);
}

CUresult work_cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy)
{
	return box_now(pCopy, true);
}

static CUresult box_async(const CUDA_MEMCPY3D *given, CUstream stream, bool is_noted)
{
	if (!given)
		return inner_cuMemcpy3DAsync_v2(given, mpsd_native(stream));
	return copy(given, true, false, stream, false, is_noted);
}

CUresult make_cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream)
{
	return box_async(pCopy, hStream, false);
}

CUresult work_cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream)
{
	return box_async(pCopy, hStream, true);
}

/* Memsets */

static CUresult set(CUdeviceptr to, size_t pitch, uint32_t value, size_t width, size_t count, size_t rows,
		    CUstream stream, bool waits)
{
	struct mpsd_op op = {
		.kind = MPSD_OP_SET,
		.waits = waits,
		.stream = stream,
		.set = { .to = to, .value = value, .width = width, .count = count, .pitch = pitch, .rows = rows,
			 .has_rows = true },
	};
	size_t end = to, bytes = 0;

	/* There is nothing to be done, or no driver could do it. */
	if (!count || !rows || !add(&bytes, count, width) || !add(&end, rows - 1, pitch) || !add(&end, 1, bytes))
		return mpsd_op_issue(&op);
	op.set.is_outside = !mpsd_is_device(to);
	return mpsd_submit_new(&op, false);
}

#define SET(now, async, type, width)										\
	CUresult work_##now(CUdeviceptr dstDevice, size_t dstPitch, type value, size_t Width, size_t Height)	\
	{													\
		return set(dstDevice, dstPitch, value, width, Width, Height, CU_STREAM_LEGACY, true);		\
	}													\
	CUresult work_##async(CUdeviceptr dstDevice, size_t dstPitch, type value, size_t Width, size_t Height,	\
			      CUstream hStream)									\
	{													\
		return set(dstDevice, dstPitch, value, width, Width, Height, hStream, false);			\
	}

SET(cuMemsetD2D8_v2, cuMemsetD2D8Async, unsigned char, 1)
SET(cuMemsetD2D16_v2, cuMemsetD2D16Async, unsigned short, 2)
SET(cuMemsetD2D32_v2, cuMemsetD2D32Async, unsigned int, 4)

/* Nodes of graphs */

struct mpsd_op *mpsd_rows_of_node(const CUDA_MEMCPY3D *given)
{
	struct mpsd_op *op = calloc(1, sizeof(*op) + sizeof(struct mpsd_rows));
	struct mpsd_rows *rows = (struct mpsd_rows *)(op + 1);
	struct side to = target_of(given), from = source_of(given);

	if (!op)
		return NULL;
	op->kind = MPSD_OP_COPY;
	*rows = (struct mpsd_rows){ .given = *given, .is_3d = true };
	/* What is in a variable of a module is known as long as the host alone writes it. */
	if (!understand(op, rows) || (from.type != CU_MEMORYTYPE_HOST && !mpsd_read(op->copy.from)) ||
	    mpsd_is_variable(op->copy.from)) {
		free(op);
		return NULL;
	}
	find_way(op, &to, &from);
	return op;
}

struct mpsd_op *mpsd_set_of_node(const CUDA_MEMSET_NODE_PARAMS *given)
{
	size_t end = given->dst, bytes = 0;
	struct mpsd_op *op;

	if (!given->width || !given->height || !add(&bytes, given->width, given->elementSize) ||
	    !add(&end, given->height - 1, given->height > 1 ? given->pitch : 0) || !add(&end, 1, bytes))
		return NULL;
	op = calloc(1, sizeof(*op));
	if (!op)
		return NULL;
	op->kind = MPSD_OP_SET;
	op->set.to = given->dst;
	op->set.value = given->value;
	op->set.width = given->elementSize;
	op->set.count = given->width;
	op->set.pitch = given->pitch;
	op->set.rows = given->height;
	op->set.has_rows = given->height > 1;
	op->set.is_outside = !mpsd_is_device(given->dst);
	mpsd_written(given->dst);
	return op;
}
