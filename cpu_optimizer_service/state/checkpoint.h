// A checkpoint: a directory with safetensors files of each plane and index.json. The planes are
// those of its groups' rules; a file is
// master.safetensors, or master-00001-of-00003.safetensors and so on. The index has the step, the
// generation, the groups' hyper-parameters, the parameters' shapes and update counts, the trainer's
// state, the record of the last step, and the size and CRC-32 of every file. Tensors are logical,
// by parameter name: they load onto any world size.
//
// This reads a checkpoint; checkpoint_writer.h writes one.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"
#include "cpu_optimizer_service/state/checkpoint_uses.h"
#include "cpu_optimizer_service/state/chunk_store.h"
#include "cpu_optimizer_service/state/safetensors.h"

namespace ballast {

class Checkpoint {
 public:
  // Whether elements [begin, begin + elements) of a parameter, or some of them, will be read. Null:
  // all will.
  using Needs = std::function<bool(const std::string& parameter, int64_t begin, int64_t elements)>;

  // Reads the index and checks every file against it, several at once: sizes, checksums, finite
  // values, no negative squares. Of files without anything that `needs` wants only the sizes.
  // `most_bytes`: of the index, and of each file's header (MostIndexBytes). NOT_FOUND: no checkpoint there. DATA_LOSS: damaged.
  static absl::StatusOr<Checkpoint> Open(FileSystem& file_system, const std::string& directory,
                                         int64_t most_bytes, const Needs& needs = nullptr);

  // Hugging Face's safetensors with only weights, in fp32, bf16 or fp16: a file, or a directory
  // with model.safetensors, or with model.safetensors.index.json and its files. `index` has the
  // wanted parameters, without its files. It has the master weights alone. Other tensors are
  // ignored. NOT_FOUND: nothing there. FAILED_PRECONDITION: a parameter is missing, or
  // has another shape. DATA_LOSS: damaged, or a weight is not finite. `hashes`: the index gets a
  // SHA-256 of the weights.
  static absl::StatusOr<Checkpoint> OpenWeights(FileSystem& file_system, const std::string& path,
                                                CheckpointIndex index, int64_t most_bytes,
                                                bool hashes = false);

  const CheckpointIndex& index() const { return index_; }
  bool is_weights() const { return weights_; }  // By OpenWeights.
  // Values, in any format.
  absl::Status Read(const std::string& parameter, Plane plane, int64_t offset,
                    absl::Span<float> out) const;
  // What is stored (packed/codes.h), from its number `first` on.
  absl::Status ReadStored(const std::string& parameter, Plane stored, int64_t first,
                          absl::Span<std::byte> out) const;
  StateFormat format(const std::string& parameter) const;

  struct BadValue {
    Plane plane = Plane::kMaster;
    int64_t element = 0;
    float value = 0;
  };
  // The first value of a parameter, of those that `needs` wants, that no update leaves in that
  // format. `parameter`: of index().
  absl::StatusOr<std::optional<BadValue>> FindBadValue(const CheckpointIndex::Parameter& parameter,
                                                       StateFormat format,
                                                       const Needs& needs) const;

 private:
  // Elements of a parameter in a file, or in one that is whole, all; of scales, groups of elements.
  struct Piece {
    int64_t begin = 0;
    int64_t elements = 0;
    int64_t offset = 0;  // The first one's, in the file's tensor.
    int file = 0;
  };
  struct PlaneFiles {
    std::vector<SafetensorsFile> files;
    std::map<std::string, std::vector<Piece>> pieces;  // By parameter, ascending.
  };

  // Calls read(file, first, count) for the pieces of that range, in order.
  template <class Read>
  absl::Status ReadPieces(const std::string& parameter, Plane stored, int64_t first, int64_t count,
                          const Read& read) const;
  // Where the parameters are, if each element is there once.
  absl::Status FindPieces(const std::string& directory, Plane plane);

  CheckpointIndex index_;
  std::map<Plane, PlaneFiles> planes_;
  std::map<std::string, StateFormat> formats_;  // By parameter; those that are not fp32.
  bool weights_ = false;
};

struct OpenedCheckpoint {
  Checkpoint checkpoint;
  std::string directory;
  std::vector<std::string> passed_over;  // Newer damaged ones, and their damage, one a line.
  CheckpointUses::Use use = nullptr;     // During its life nobody in this process deletes it.
};
// Opens `path`, or, if it is a folder of checkpoints (checkpoint_folder.h), the newest undamaged
// one. An unreadable, irregular or renamed one counts as damaged. One of a newer format, or without
// memory to read it, is an error, because resuming from an older one is the caller's choice.
// UNAVAILABLE: each was deleted while it was read. `uses`: of this process, if it deletes
// checkpoints.
absl::StatusOr<OpenedCheckpoint> OpenNewest(FileSystem& file_system, const std::string& path,
                                            int64_t most_bytes, CheckpointUses* uses = nullptr,
                                            const Checkpoint::Needs& needs = nullptr);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_
