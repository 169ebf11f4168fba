// The functions of client/ballast.h that say what lies where.
#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/ballast.h"
#include "client/c_api/c_call.h"
#include "client/c_api/c_session.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/status.h"

using namespace ballast;  // The functions below are all that this file exports.
using namespace ballast::client;

extern "C" {

int32_t ballast_chunks(const ballast_session* session, ballast_chunk* out, size_t capacity,
                       size_t* count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(count, "count"));
    const absl::Span<const Chunk> chunks = session->session->layout().chunks();
    *count = chunks.size();
    for (size_t i = 0; out != nullptr && i < std::min(capacity, chunks.size()); ++i) {
      out[i] = {.index = static_cast<int32_t>(i),
                .group = chunks[i].group,
                .begin = chunks[i].begin,
                .elements = chunks[i].elements};
    }
    return absl::OkStatus();
  });
}

int32_t ballast_pieces(const ballast_session* session, int32_t chunk, ballast_piece* out,
                       size_t capacity, size_t* count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(count, "count"));
    BALLAST_RETURN_IF_ERROR(FindOwnChunk(*session, chunk).status());
    *count = 0;
    // Parts, and not the layout's pieces: those say where elements lie in the whole parameter, and
    // with a mesh the caller has its shard alone.
    session->session->layout().VisitParts(chunk, [&](const ChunkPart& part) {
      if (out != nullptr && *count < capacity) {
        out[*count] = {.parameter = static_cast<size_t>(part.parameter),
                       .offset = part.part_offset,
                       .chunk_offset = part.chunk_offset,
                       .elements = part.elements};
      }
      ++*count;
      return true;
    });
    return absl::OkStatus();
  });
}

}  // extern "C"
