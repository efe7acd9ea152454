// Reads crop, height and width of the output, how many numbers and uniforms there are, the numbers, and then of each image
// its size (double) and uniforms (float); writes start, extent (double) and mirror (as a double) of each.
#include <cstdio>
#include <vector>

#include "region.h"

int main() {
  double head[5], size[2];
  if (std::fread(head, sizeof head, 1, stdin) != 1) return 1;
  std::vector<double> numbers(static_cast<size_t>(head[3]));
  std::vector<float> uniforms(static_cast<size_t>(head[4]));
  if (std::fread(numbers.data(), 8, numbers.size(), stdin) != numbers.size()) return 1;
  dali_tf_input::Work work;
  work.height = static_cast<int>(head[1]), work.width = static_cast<int>(head[2]);
  while (std::fread(size, sizeof size, 1, stdin) == 1 && std::fread(uniforms.data(), 4, uniforms.size(), stdin)) {
    dali_tf_input::Image image;
    image.height = static_cast<int64_t>(size[0]), image.width = static_cast<int64_t>(size[1]);
    const auto crop = static_cast<dali_tf_input::Crop>(static_cast<int>(head[0]));
    FindRegion(work, crop, numbers.data(), uniforms.data(), static_cast<int64_t>(uniforms.size()), &image);
    for (int axis = 0; axis < 2 && image.shown[0]; ++axis) {  // from what the region's outputs show to what all would
      const double outputs = axis ? work.width : work.height;
      image.start[axis] = -image.before[axis] * image.extent[axis] / image.shown[axis];
      image.extent[axis] = outputs * image.extent[axis] / image.shown[axis];
    }
    const double found[] = {image.start[0], image.start[1], image.extent[0], image.extent[1], image.mirror ? 1.0 : 0.0};
    std::fwrite(found, sizeof found, 1, stdout);
  }
}
