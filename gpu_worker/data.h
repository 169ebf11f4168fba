// Byte-level text and the batches cut from it. A batch is a pure function of (seed, step,
// micro-step, global sample index), so a redone step is the same step, and any number of ranks work
// on the same global batch: rank r of W takes samples r, r + W, r + 2W, ...
#ifndef BALLAST_GPU_WORKER_DATA_H_
#define BALLAST_GPU_WORKER_DATA_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast::worker {

inline constexpr char kDefaultText[] = "/usr/share/common-licenses";

// `sequences` rows of `context` tokens, row after row; targets[i] is the token that follows
// inputs[i].
struct Batch {
  int sequences = 0;
  int context = 0;
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;
};

struct BatchPosition {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint32_t micro_step = 0;
};

class TextData {
 public:
  // Reads a file, or every plain file of a directory in order of name (links followed, each file
  // once). NOT_FOUND or INVALID_ARGUMENT, saying what to do, if it cannot be read or has fewer than
  // context + 1 bytes.
  static absl::StatusOr<TextData> Read(const std::string& path, int context);
  // The same for text that is at hand.
  static absl::StatusOr<TextData> FromText(std::string text, const std::string& name, int context);

  const std::string& text() const { return text_; }
  int64_t bytes() const { return static_cast<int64_t>(text_.size()); }

  // This rank's slice of the global batch of `global_sequences` samples; may be empty.
  Batch Slice(const BatchPosition& position, int global_sequences, int rank, int world_size) const;

 private:
  TextData(std::string text, int context) : text_(std::move(text)), context_(context) {}

  std::string text_;
  int context_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DATA_H_
