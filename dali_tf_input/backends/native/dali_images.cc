// DaliTfInputImages, an operator of DALI: the encoded images of a packed batch, see packed.h.
//
// On a GPU the batch says where images are in their files: what a dataset there is fed crosses the bus twice, to the GPU and
// back, so it should be small.
//
// It needs DALI's C++ headers, and fits the DALI that it was compiled against only: see `dali_operator.py`.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "dali/pipeline/operator/operator.h"

#include "read.h"
#include "packed.h"

namespace dali_tf_input {

class Images : public dali::Operator<dali::CPUBackend> {
 public:
  explicit Images(const dali::OpSpec& spec)
      : Operator(spec), files_(spec.GetRepeatedArgument<std::string>("files")), values_size_(spec.GetArgument<int64_t>("values_size")) {
    for (const std::string& number : spec.GetRepeatedArgument<std::string>("versions")) versions_.push_back(std::stoll(number));
    if (versions_.size() != 2 * files_.size()) throw std::invalid_argument("a size and a time for each file are needed");
    OpenFiles().AddReader();
  }
  ~Images() override { OpenFiles().RemoveReader(); }

 protected:
  bool SetupImpl(std::vector<dali::OutputDesc>& outputs, const dali::Workspace& workspace) override {
    const auto& rows = workspace.Input<dali::CPUBackend>(0);
    const int64_t start = kPlaceSize + values_size_;
    places_.clear(), sizes_.resize(rows.num_samples());
    for (int number = 0; number < rows.num_samples(); ++number) {
      const int64_t size = rows.tensor_shape_span(number)[0];
      share_ = size - start;
      if (share_ < 0 || size != rows.tensor_shape_span(0)[0]) throw std::runtime_error("rows of one size are needed");
      Place place;
      std::memcpy(&place, rows.tensor<uint8_t>(number), sizeof place);
      const bool is_here = place.file < 0;
      const int64_t end = is_here ? share_ * rows.num_samples() : INT64_MAX;
      if (place.file >= static_cast<int64_t>(files_.size()) || place.offset < 0 || place.size < 0 || place.offset > end - place.size) {
        throw std::runtime_error("a row names no image");
      }
      places_.push_back(place), sizes_.set_tensor_shape(number, dali::TensorShape<1>{place.size});
    }
    outputs.resize(1);
    outputs[0] = {sizes_, DALI_UINT8};
    return true;
  }

  void RunImpl(dali::Workspace& workspace) override {
    const auto& rows = workspace.Input<dali::CPUBackend>(0);
    auto& images = workspace.Output<dali::CPUBackend>(0);
    auto& threads = workspace.GetThreadPool();
    for (size_t number = 0; number < places_.size(); ++number) {
      const Place& place = places_[number];
      auto* image = images.mutable_tensor<uint8_t>(static_cast<int>(number));
      threads.AddWork([this, &rows, place, image](int) { place.file < 0 ? Copy(rows, place, image) : Read(place, image); }, place.size);
    }
    threads.RunAll();
  }

 private:
  // Copies an image from the shares of the rows that it lies in.
  template <typename Rows>
  void Copy(const Rows& rows, const Place& place, uint8_t* image) const {
    ForParts(place, share_, [&](int64_t row, int64_t at, int64_t size) {
      const auto* share = rows.template tensor<uint8_t>(static_cast<int>(row)) + kPlaceSize + values_size_;
      std::memcpy(image, share + at, static_cast<size_t>(size));
      image += size;
    });
  }

  // Reads an image from its file. DaliTfInputPack has checked the record's CRC a moment before.
  void Read(const Place& place, uint8_t* image) const {
    const auto number = static_cast<size_t>(place.file);
    const std::string& name = files_[number];
    Problem problem;
    for (int attempt = 0; attempt < 2; ++attempt) {
      std::shared_ptr<File> file;
      problem = OpenFiles().Open(name, versions_[2 * number], versions_[2 * number + 1], &file);
      if (problem.text.empty()) problem = ReadBytes(*file, name, place.offset, place.size, image);
      if (problem.text.empty()) return;
      if (!file) break;
      OpenFiles().Forget(name, file);  // it may have been cut or replaced, and restored since
    }
    throw std::runtime_error(problem.text);
  }

  std::vector<std::string> files_;
  std::vector<int64_t> versions_;
  int64_t values_size_, share_ = 0;  // bytes of a row
  std::vector<Place> places_;
  dali::TensorListShape<1> sizes_;
};

}  // namespace dali_tf_input

namespace dali {
DALI_REGISTER_OPERATOR(DaliTfInputImages, ::dali_tf_input::Images, CPU);
DALI_SCHEMA(DaliTfInputImages)
    .DocStr("The encoded images of a packed batch of dali_tf_input.")
    .NumInput(1)
    .NumOutput(1)
    .AddOptionalArg("files", "The files that a batch may name.", std::vector<std::string>())
    .AddOptionalArg("versions", "The size in bytes and the time of modification in ns of each file, in decimals.", std::vector<std::string>())
    .AddArg("values_size", "How many bytes of a row are the values of its image.", DALI_INT64);
}  // namespace dali
